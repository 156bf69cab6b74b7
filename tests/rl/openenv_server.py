"""A game of OpenEnv: `.venv-openenv/bin/python openenv_server.py PORT SESSIONS`, or, in the form of its messages alone,
without the library (`served`)."""

import contextlib
import json
import random
import sys
import threading
from collections.abc import Iterator

SAYS_NO = {
    "type": "error",
    "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [{"msg": "an integer"}]},
}


class Guess:
    """A number from `low` to 9 is guessed within three turns; 13 is an error of the server."""

    def begin(self, seed=None, low=1):
        self.number, self.left = random.Random(seed).randint(low, 9), 3
        return f"from {low} to 9", 0.0, False

    def guess(self, number):
        if number == 13:
            raise ValueError("unlucky")
        self.left -= 1
        if number == self.number:
            return "yes", 1.0, True
        return "higher" if number < self.number else "lower", 0.0, self.left == 0


@contextlib.contextmanager
def served(sessions: int) -> Iterator[tuple[str, list]]:
    """Serve the game; yield its address and all that it was sent."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve

    sent, running = [], []

    def session(socket):
        running.append(socket)
        try:
            if len(running) > sessions:
                error = {"code": "CAPACITY_REACHED", "message": f"{sessions}/{sessions} sessions active"}
                socket.send(json.dumps({"type": "error", "data": error}))
                return
            game = Guess()
            with contextlib.suppress(ConnectionClosed):  # the process of the environment has ended
                for line in socket:
                    message = json.loads(line)
                    sent.append(message)
                    socket.send(json.dumps(answer(game, message)))
        finally:
            running.remove(socket)

    with serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", sent
        server.shutdown()


def answer(game, message):
    data = message["data"]
    try:
        if message["type"] == "reset":
            hint, reward, done = game.begin(**data)
        elif set(data) != {"guess"} or not str(data["guess"]).isdigit():
            return SAYS_NO
        else:
            hint, reward, done = game.guess(int(data["guess"]))
    except ValueError as error:
        return {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": str(error)}}
    return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}


def as_guess(text, name):
    return {name: int(text.strip("[]"))}


def main(port: int, sessions: int) -> None:
    """Serve the game with the library."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.interfaces import Environment  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore[reportMissingImports]

    class Guessed(Action):
        guess: int

    class Hint(Observation):
        hint: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.game = Guess()

        def reset(self, seed=None, episode_id=None, low=1, **_):
            hint, reward, done = self.game.begin(seed, low)
            return Hint(hint=hint, reward=reward, done=done)

        def step(self, action, timeout_s=None, **_):
            hint, reward, done = self.game.guess(action.guess)
            return Hint(hint=hint, reward=reward, done=done)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Game, Guessed, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
