"""Retraining on a schedule or an event: `python flows/retrain_flow.py run --config configs/tiny/retrain.yaml`."""

from metaflow import step

from flows.base import PostTrainFlow
from ptf.config import Job
from steps import retrain


class RetrainFlow(PostTrainFlow):
    """Look for new data; continue training from the published model; publish the result if it is better, or at
    most `publish.max_regression` worse. For any recipe."""

    default_config = "configs/tiny/retrain.yaml"
    publication = staticmethod(retrain.publish)

    @step
    def prepare(self):
        """Make the data, and find out whether there are new data."""
        self._stage(retrain.prepare)
        with self._reporting_errors():
            self.found = "news" if retrain.has_new_data(self._job(), self.artifact) else "nothing"
        self.next(
            {"news": self.tokenize, "nothing": self.end},  # pyright: ignore[reportArgumentType]
            condition="found",
        )

    @step
    def end(self):
        """Print the result."""
        if self.artifact.published:
            print(f"run name   {self.run_name}\npublished  {self.artifact.published}")
        else:
            print(retrain.outcome(self._job()) if self.found == "news" else "nothing published: there are no new data")

    def _job(self) -> Job:
        return retrain.starting_from_published(super()._job(), self.artifact)


if __name__ == "__main__":
    RetrainFlow()
