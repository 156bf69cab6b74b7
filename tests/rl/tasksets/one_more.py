"""A taskset of verifiers: the number after one digit, as a user would write it."""

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["OneMore"]


class Data(vf.TaskData):
    """A task, with the answer that only the reward sees."""

    answer: str


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    """A question and its reward."""

    @vf.reward
    async def right(self, trace) -> float:
        """Return 1 for the right number."""
        return float(trace.last_reply.strip() == self.data.answer)


class OneMore(vf.Taskset[Task, vf.TasksetConfig]):
    """Ten tasks."""

    def load(self):
        """Yield the tasks."""
        for digit in range(10):
            yield Task(Data(prompt=f"{digit}+1", answer=str(digit + 1)), self.config.task)
