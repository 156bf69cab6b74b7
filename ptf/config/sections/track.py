"""The section `track`: where metrics and samples of responses are written."""

from ptf.config.section import Count, Positive, Section, changeable


class TrackConfig(Section):
    """Where metrics are written, in addition to metrics.jsonl, which always is."""

    tensorboard: bool = changeable(True)
    """Write TensorBoard event files beside metrics.jsonl."""
    wandb_project: str | None = changeable(None)
    """A project of Weights & Biases; the package must be installed and logged in. Runs keep their names there."""
    samples_every: Count = changeable(20)
    """Online recipes: write responses token by token, with log-probs and advantages, to `RUN/samples.jsonl` in the
    first step and in every step that is a multiple of this number; 0: never."""
    sample_prompts: Positive = changeable(2)
    """Number of prompts whose responses are written (`samples_every`); all responses to each prompt are written."""
    print_every: Positive = changeable(10)
    """Steps between lines on the console."""
