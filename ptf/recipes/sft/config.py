"""Config keys of supervised fine-tuning."""

from typing import ClassVar

from ptf.config.section import AlgoConfig


class SFTConfig(AlgoConfig):
    """Supervised fine-tuning has no keys of its own."""

    may_share_prefixes: ClassVar[bool] = True
