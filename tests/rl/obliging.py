"""An environment for tests, apart from the others because it takes longer to import."""

from ptf.rl.environments.protocol import StepResult
from ptf.tasks.calculator import Calculator


class Obliging(Calculator):
    """It answers whatever it is asked."""

    def step(self, text):
        self.heard = getattr(self, "heard", 0) + 1
        return StepResult(
            [{"role": "tool", "content": str(self.third)}], reward=super().step(text).reward, done=self.heard == 2
        )
