"""An environment for tests, apart from the others because it takes longer to import."""

from ptf.rl.environments.protocol import Turn
from ptf.tasks.calculator import Calculator


class Obliging(Calculator):
    """It answers whatever it is asked."""

    def act(self, text):
        self.heard = getattr(self, "heard", 0) + 1
        return Turn(
            [{"role": "tool", "content": str(self.third)}], reward=super().act(text).reward, done=self.heard == 2
        )
