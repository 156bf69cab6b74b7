"""The section `checkpoint`: when the state of a run is written, and which states are kept."""

from ptf.config.section import Positive, PositiveFloat, Section, changeable


class CheckpointConfig(Section):
    """Checkpoints from which training continues exactly."""

    to: str | None = None
    """Directory or URI (`s3://…`) in which each run has a directory of checkpoints; default: the run's own."""
    every: Positive = changeable(100)
    """Steps between checkpoints; one is always written after the last step. Offline recipes train on while it is
    written; online recipes wait."""
    keep: Positive = changeable(2)
    """Number of checkpoints that are kept, the newest ones."""
    best: str | None = None
    """`loss/NAME` of one of `data.validation`. Offline recipes: also keep the checkpoint where this metric is lowest,
    and export its weights at the end."""
    sha256_max_gib: PositiveFloat = changeable(64.0)
    """Checkpoints, tokenized and prepared data, published models and copies of remote ones are compared with their
    SHA-256 when they are read again. If a directory has more GiB to hash than this, only the sizes of its files are
    compared, and the run says so. All files of a checkpoint count; of other directories those that have changed since
    they were last hashed."""
    accept_version_changes: bool = changeable(False)
    """Continue although ptf or its packages have changed since the checkpoint. The run may then differ in its bits from
    one that was never interrupted."""
