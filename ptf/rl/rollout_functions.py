"""The rollout functions of a job by source: environments, a function of the user's, a harness, or single responses."""

from collections.abc import Mapping
from dataclasses import dataclass

from ptf.config import Plugin, plugin
from ptf.config.sections.rollout import HarnessConfig
from ptf.data.tokenizer import Tokenizer
from ptf.rl.endpoint.harness_rollout import HarnessRollout
from ptf.rl.environments.protocol import Environments
from ptf.rl.environments.rollout import EnvironmentRollout
from ptf.rl.episodes import RolloutFunction, one_response


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a rollout role and its limits: picklable values that are sent to the workers."""

    plugin: Plugin
    weight: float
    max_turns: int
    processes: int
    timeout_s: float
    retries: int

    def start(self) -> Environments:
        """Return the environments; their processes start when they are first used."""
        return Environments(self.plugin, processes=self.processes, timeout_s=self.timeout_s, retries=self.retries)


class RolloutFunctions:
    """What plays the episodes of each source."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        environments: Mapping[str, EnvironmentSpec] | None = None,
        play: Plugin | None = None,
        harness: HarnessConfig | None = None,
    ) -> None:
        self.by_source: dict[str, RolloutFunction] = {}  # the one of all sources has the name ""
        self.environments: list[Environments] = []
        for source, spec in (environments or {}).items():
            self.environments.append(spec.start())
            self.by_source[source] = EnvironmentRollout(self.environments[-1], spec.max_turns, spec.weight)
        if play:
            self.by_source[""] = plugin.bind(play)
        if harness:
            self.by_source[""] = HarnessRollout.of(harness, tokenizer)

    def of(self, source: str) -> RolloutFunction:
        """Return what plays the episodes of a source."""
        return self.by_source.get(source, self.by_source.get("", one_response))

    def take_retries(self) -> int:
        """Return the number of requests to environments that were retried since the last call."""
        return sum(environments.take_retries() for environments in self.environments)

    def close(self) -> None:
        """End the processes of the environments and of the harness."""
        for environments in self.environments:
            environments.close()
        for function in self.by_source.values():
            if isinstance(function, HarnessRollout):
                function.close()
