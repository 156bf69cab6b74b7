"""Several trainings that differ in some keys, of which the best is published: `python flows/sweep_flow.py run --config configs/tiny/sweep.yaml`."""

# metaflow makes `current.card` at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from metaflow import card, current, step

from flows import cards
from flows.base import PostTrainFlow
from ptf.config import Job, loads


class SweepFlow(PostTrainFlow):
    """Train and evaluate every trial of flow.sweep; publish the best by publish.metric. Any recipe. On this machine one trial after the other, or as many
    at once as `--max-workers` says."""

    default_config = "configs/tiny/sweep.yaml"
    at_once = 1

    @step
    def start(self):
        """Check every trial before the first one runs."""
        from steps.sweep import trials

        self.lineage, self.trial = self._lineage(), ""
        with self._said():
            self.trials = trials(self._job())
        self.next(self.prepare, foreach="trials")

    @step
    def prepare(self):
        """Make the data that `data.prepare` describes."""
        from steps.artifact import Artifact
        from steps.prepare import prepare

        self.number, self.trial, self.artifact = self.index, self.input, Artifact(lineage=f"{self.lineage}-{self.index}")
        self._stage(prepare)
        self.next(self.tokenize)

    @card(type="blank", id="evaluate")
    @step
    def evaluate(self):
        """Score the trained model on held-out prompts."""
        from steps.evaluate import evaluate

        self._stage(evaluate)
        cards.metrics_page(current.card["evaluate"], self.artifact.lineage, self.artifact.metrics)
        self.next(self.choose)

    @step
    def choose(self, inputs):
        """Take the best, and go on with it alone."""
        from steps.sweep import best

        self.trial, trials = "", sorted(inputs, key=lambda trial: trial.number)
        with self._said():
            chosen = trials[best(self._job(), [trial.artifact.metrics for trial in trials])]
        self.lineage, self.trial, self.artifact = chosen.lineage, chosen.trial, chosen.artifact
        self.next(self.publish)

    def _job(self) -> Job:
        return loads(self.trial) if self.trial else super()._job()


if __name__ == "__main__":
    SweepFlow()
