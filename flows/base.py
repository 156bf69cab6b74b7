"""The DAG that every recipe shares: start → prepare → tokenize → train → evaluate → publish → end.

A step calls the function that does its work and names the next step. This module provides the rest: the environment,
error messages, retries and cards.

    python flows/sft_flow.py run --config configs/tiny/sft.yaml --set train.lr=1e-5
    python flows/sft_flow.py resume --origin-run-id RUN
"""

# Metaflow creates its public names, and `current.card`, at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import contextlib
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from metaflow import Config, FlowSpec, Parameter, Run, card, current, get_namespace, namespace, step
from metaflow.exception import (
    METAFLOW_EXIT_DISALLOW_RETRY,
    MetaflowException,
    MetaflowInvalidPathspec,
    MetaflowNotFound,
)
from metaflow.system_context import system_context
from metaflow.util import get_latest_run_id

from flows import argv, cards, processes
from flows.settings import FromConfig
from ptf.artifact import Artifact
from ptf.config import ConfigError, Job, loads
from ptf.errors import Retryable, UserError
from ptf.workspace import disk
from ptf.workspace.credentials import from_environment, redacted
from steps import stages


class BadConfig(MetaflowException):
    """An invalid config, as Metaflow reports it."""

    headline = "Bad config"


def parse(text: str) -> dict[str, Any]:
    """Return the job in the form that Metaflow stores.

    `text` is the checked job from the command line, or a config from Metaflow's own options and environment variables.
    """
    try:
        return loads(text).model_dump(mode="json")
    except ConfigError as error:
        raise BadConfig(str(error)) from None


class PostTrainFlow(FlowSpec):
    """Prepare data, tokenize it, train, evaluate, publish."""

    recipes: tuple[str, ...] = ()  # recipes that the flow runs, () for all; a plugin recipe runs in every flow
    default_config = "configs/tiny/{recipe}.yaml"  # of the first of `recipes`; in a folder above the flow's file
    at_once: int | None = None  # default of --max-workers: tasks of a run at the same time on this machine
    publication = staticmethod(stages.publish)  # the work of the step publish

    config = Config(
        "config",
        parser=parse,
        help="The job; usually given as `run --config FILE.yaml [FILE.yaml ...] --set KEY=VALUE`.",
    )

    continued = Parameter(
        "continue",
        type=str,
        default=None,
        help="The name of an earlier training run to continue; docs/config.md marks the keys that may differ.",
    )

    def __init__(self, use_cli: bool = True):
        if use_cli:
            self._command_line()
        else:
            # called by Metaflow after the config has been applied to the class
            super().__init__(use_cli=False)

    @step
    def start(self):
        """Name the training run; a resume keeps the name, so it continues from this run's checkpoints.
        `run --continue RUN_NAME` uses the name of an earlier run."""
        self.run_name = self._run_name()
        self.artifact = Artifact(run_name=self.run_name)
        self.next(self.prepare)

    @step
    def prepare(self):
        """Make the data of `data.prepare`."""
        self._stage(stages.prepare)
        self.next(self.tokenize)

    @step
    def tokenize(self):
        """Tokenize the data, to parquet."""
        self._stage(stages.tokenize)
        self.next(self.train)

    @card(type="blank", id="train", refresh_interval=0)
    @step
    def train(self):
        """Train, from the run's newest checkpoint if there is one."""
        with cards.live(current.card["train"], self._job(), self._artifact().run_name):
            self._stage(stages.train)
        self.next(self.evaluate)

    @card(type="blank", id="evaluate")
    @step
    def evaluate(self):
        """Evaluate the trained model on held-out data."""
        self._stage(stages.evaluate)
        cards.metrics_page(current.card["evaluate"], self.artifact, self._job())
        self.next(self.publish)

    @card(type="blank", id="publish", refresh_interval=0)
    @step
    def publish(self):
        """Publish the model if it passes the publish checks."""
        with cards.publishing(current.card["publish"], self._artifact, stages.page):
            self._stage(self.publication)
        self.next(self.end)

    @step
    def end(self):
        """Print the run's name, and the paths of the model and of the published version."""
        print(f"run name   {self.run_name}\nmodel      {self.artifact.model}\npublished  {self.artifact.published}")

    def _run_name(self) -> str:
        flow = re.sub(
            r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", type(self).__name__.removesuffix("Flow")
        ).lower()
        if self.continued is None:
            return f"{flow}-{current.run_id}"
        with self._reporting_errors():
            stages.raise_if_unknown_run(str(self.continued), self._run_directories(str(self.continued)))
        return str(self.continued)

    def _run_directories(self, run_name: str) -> list[Path]:
        """Return the directories of the training runs of a flow that continues under this name; one of them exists."""
        return [Path(self._job().output) / run_name]

    def _stage(self, work: Callable[[Job, Artifact], Artifact]) -> None:
        with self._reporting_errors():
            self.artifact = work(self._job(), self._artifact())

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Run a block in the environment of the config.

        An error that the user must fix is printed as one message and not retried, since it would occur again.
        """
        try:
            self._enter_environment()
            with disk.disk_errors_as_user_errors(self._job().output):
                yield
        except Retryable as ended:  # a retry continues from the last checkpoint
            sys.exit(redacted(str(ended)))
        except UserError as error:
            print(redacted(str(error)), file=sys.stderr)
            # without retries, 1: Metaflow's message is clearer
            retried = current.retry_count < (system_context.max_user_code_retries or 0)
            sys.exit(METAFLOW_EXIT_DISALLOW_RETRY if retried else 1)

    def _enter_environment(self) -> None:
        """Set the variables of `flow.stages.NAME.env_vars` from the environment variables that they refer to, whose
        values are not stored in the config."""
        name = str(current.step_name).removesuffix("_first")
        if step := self._job().flow.stages.get(name):  # pyright: ignore[reportArgumentType]
            os.environ.update(
                {
                    key: from_environment(value, f"flow.stages.{name}.env_vars.{key}")
                    for key, value in step.env_vars.items()
                }
            )

    def _job(self) -> Job:
        return loads(json.dumps(self.config))

    def _artifact(self) -> Artifact:
        """Return the artifact of the previous steps.

        `spin` repeats a step of a finished run and must not change its checkpoints, so it gets a different name.
        """
        spinning = argv.command(sys.argv) == "spin-step"
        return self.artifact.with_changes(run_name=f"{self.artifact.run_name}-spin") if spinning else self.artifact

    def _command_line(self) -> None:
        """Run Metaflow's command line: first translate the options for the config; if the run fails, print the command
        that resumes it."""
        try:
            words = argv.sort(sys.argv[1:])
            sys.argv[1:], note = argv.rewrite(words, self.recipes, self._default())
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        if note:
            print(note, file=sys.stderr)
        verb = argv.command(words.rest)
        if verb == "resume":
            sys.argv += [word for tag in self._origin_tags(words.rest) for word in ("--tag", tag)]
        if (
            self.at_once
            and verb in ("run", "resume")
            and not any(word.startswith("--max-workers") for word in words.rest)
        ):
            sys.argv += ["--max-workers", str(self.at_once)]
        if verb in ("step", "spin-step"):
            processes.follow()
        elif verb in ("run", "resume", "spin"):
            processes.lead()
        try:
            super().__init__()
        except SystemExit as stop:
            if stop.code and verb in ("run", "resume") and (run := current.get("run_id")):
                again = ["python", sys.argv[0], *words.rest[: words.rest.index(verb)], "resume", "--origin-run-id", run]
                print(
                    "To continue with other values of keys that may change: `run` with --set KEY=VALUE and "
                    "--continue RUN_NAME\n"
                    f"To try again from where it stopped, with the same config:\n    {shlex.join(again)}",
                    file=sys.stderr,
                )
            raise

    def _origin_tags(self, words: Sequence[str]) -> list[str]:
        """Return the tags of the run that is resumed, because Metaflow does not copy them."""
        origin = (
            dict(pairwise(words)).get("--origin-run-id")
            or next((word.partition("=")[2] for word in words if word.startswith("--origin-run-id=")), None)
            or get_latest_run_id(lambda *_: None, type(self).__name__)
        )
        seen = get_namespace()
        namespace(None)
        try:
            return sorted(Run(f"{type(self).__name__}/{origin}").user_tags)
        except (MetaflowNotFound, MetaflowInvalidPathspec):  # Metaflow reports the error itself
            return []
        finally:
            namespace(seen)

    def _default(self) -> Path:
        config = self.default_config.format(recipe=self.recipes[0] if self.recipes else "sft")
        above = Path(inspect.getfile(type(self))).resolve().parents
        return next((folder / config for folder in above if (folder / config).exists()), Path(config))


FromConfig(PostTrainFlow)  # applies to the subclasses; used as a decorator, it would replace the class by itself
