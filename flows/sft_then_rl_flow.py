"""Fine-tuning followed by reinforcement learning as one flow.

    python flows/sft_then_rl_flow.py run --config configs/tiny/grpo.yaml

The config is that of the second training. Its `model.path: job:CONFIG` names the config of the first training, whose
stages are steps of this flow too, so that they are displayed, retried and resumed like the others.
"""

# Metaflow creates `current.card` at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from pathlib import Path

from metaflow import card, current, step

from flows import cards
from flows.base import PostTrainFlow
from ptf.artifact import Artifact
from ptf.config import Job, dump, load, loads
from ptf.config.schema import online_recipes
from ptf.errors import UserError
from steps import stages


class SFTThenRLFlow(PostTrainFlow):
    """Prepare, tokenize, train, evaluate and publish twice: first the job that `model.path` names, then the job that
    starts from its model."""

    recipes = online_recipes()
    default_config = "configs/tiny/grpo.yaml"

    @step
    def start(self):
        """Name both training runs, and store the config of the first one, so that a resume does not read its file."""
        path = super()._job().model.path
        with self._reporting_errors():
            if not path.startswith("job:"):
                raise UserError(
                    f"model.path: {path} is not the model of another job; name one (job:configs/tiny/sft.yaml), "
                    "or run the recipe's own flow"
                )
            self.first = dump(load(path.removeprefix("job:")))
        self.run_name = self._run_name()
        self.artifact = Artifact(run_name=f"{self.run_name}-first")
        self.published_first = None
        self.next(self.prepare_first)

    @step
    def prepare_first(self):
        """Make the data of the first training."""
        self._stage(stages.prepare)
        self.next(self.tokenize_first)

    @step
    def tokenize_first(self):
        """Tokenize the data of the first training."""
        self._stage(stages.tokenize)
        self.next(self.train_first)

    @card(type="blank", id="train", refresh_interval=0)
    @step
    def train_first(self):
        """Train the first model."""
        with cards.live(current.card["train"], self._job(), self._artifact().run_name):
            self._stage(stages.train)
        self.next(self.evaluate_first)

    @card(type="blank", id="evaluate")
    @step
    def evaluate_first(self):
        """Evaluate the first model."""
        self._stage(stages.evaluate)
        cards.metrics_page(current.card["evaluate"], self.artifact, self._job())
        self.next(self.publish_first)

    @card(type="blank", id="publish", refresh_interval=0)
    @step
    def publish_first(self):
        """Publish the first model if it passes the publish checks."""
        with cards.publishing(current.card["publish"], self._artifact, stages.page):
            self._stage(stages.publish)
        self.published_first = self.artifact.published
        self.artifact = Artifact(run_name=self.run_name)
        self.next(self.prepare)

    @step
    def prepare(self):
        """Make the data of the second training. It starts from the version that the first training published, even if a
        newer version has been published since."""
        self._stage(stages.prepare)
        self.artifact = self.artifact.with_changes(
            models={**self.artifact.models, self._job().model.path: str(self.published_first)}
        )
        self.next(self.tokenize)

    def _run_directories(self, run_name: str) -> list[Path]:
        first, second = loads(self.first), super()._job()
        return [Path(second.output) / run_name, Path(first.output) / f"{run_name}-first"]

    def _job(self) -> Job:
        # neither attribute exists in `start`
        first = None if getattr(self, "published_first", None) else getattr(self, "first", None)
        return super()._job() if first is None else loads(first)


if __name__ == "__main__":
    SFTThenRLFlow()
