"""Config keys of supervised fine-tuning."""

from typing import ClassVar

from ptf.config.section import Knobs


class SFTKnobs(Knobs):
    """Supervised fine-tuning has no keys of its own."""

    may_share_beginnings: ClassVar[bool] = True
