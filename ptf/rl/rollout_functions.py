"""The rollout functions of a job by source: environments, a function of the user's, a harness, or single responses."""

from ptf.config import plugin
from ptf.config.sections.rollout import RolloutConfig
from ptf.data.tokenizer import Tokenizer
from ptf.rl.endpoint.harness_rollout import HarnessRollout
from ptf.rl.environments.protocol import Environments
from ptf.rl.environments.rollout import EnvironmentRollout
from ptf.rl.episodes import RolloutFunction, one_response


class RolloutFunctions:
    """What plays the episodes of each source."""

    def __init__(self, tokenizer: Tokenizer, config: RolloutConfig) -> None:
        self.by_source: dict[str, RolloutFunction] = {}  # the one of all sources has the name ""
        self.environments: list[Environments] = []  # whose processes start when they are first used
        for source, what in config.environment.items():
            environments = Environments(
                what.plugin,
                processes=config.reward_processes,
                timeout_s=config.reward_timeout_s,
                retries=config.reward_retries,
            )
            self.environments.append(environments)
            self.by_source[source] = EnvironmentRollout(environments, config.max_turns, what.weight)
        if config.play:
            self.by_source[""] = plugin.bind(config.play)
        if config.harness:
            self.by_source[""] = HarnessRollout(config.harness, tokenizer)

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
