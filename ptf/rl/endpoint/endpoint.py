"""The endpoint: sessions behind one server, by path.

`POST /s/SESSION/v1/chat/completions`, `POST /s/SESSION/v1/responses` and `GET /s/SESSION/v1/models` are for the agent,
with its key. `POST /s/SESSION/reward` and `POST /s/SESSION/close` are for whoever scores the episode, with the key of
the scorer.
"""

from collections.abc import Sequence
from functools import partial

from ptf.data.trajectory import is_reward
from ptf.rl.endpoint.chat import ChatRequest, parse_chat
from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse, json_response
from ptf.rl.endpoint.http_server import HttpServer
from ptf.rl.endpoint.response_form import http_response
from ptf.rl.endpoint.responses import ResponsesRequest, parse_responses
from ptf.rl.endpoint.session import MODELS, Session
from ptf.rl.policy.calls import Message

METHODS = {"v1/models": "GET", **dict.fromkeys(("v1/chat/completions", "v1/responses", "reward", "close"), "POST")}


class Endpoint:
    """Serves sessions on a port of this machine."""

    def __init__(self) -> None:
        self.server = HttpServer(self._handle, admit=self._admitted)
        self.sessions: dict[str, Session] = {}

    async def start(self) -> None:
        """Listen."""
        await self.server.start()

    async def close(self) -> None:
        """End all sessions, and stop listening."""
        for session in self.sessions.values():
            await session.close()
        await self.server.close()

    def open(self, session: Session) -> str:
        """Serve a session; return its base URL, as OpenAI's SDKs take it."""
        self.sessions[session.id] = session
        return f"http://{self.server.host}:{self.server.port}/s/{session.id}/v1"

    def _admitted(self, request: HttpRequest) -> tuple[Session | None, str]:
        """Return the session of a request, None for the path of no session, and the path in it. Raises HttpError."""
        if request.path == "/health":
            return None, request.path
        _, _, name, *rest = [*request.path.split("/"), "", "", ""]
        session = self.sessions.get(name) if request.path.startswith("/s/") else None
        if session is None:
            raise HttpError(404, "there is no such path, or no such session")
        path = "/".join(rest).rstrip("/")
        if not request.has_key(session.scorer_key if path in ("reward", "close") else session.agent_key):
            raise HttpError(401, "the API key is not that of this session", "invalid_api_key")
        return session, path

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        session, path = self._admitted(request)
        if session is None:
            return json_response({"status": "ok"})
        if session.closed:
            raise HttpError(410, "this session is closed", "session_closed")
        if path not in METHODS:
            raise HttpError(404, f"there is no path {path[:80]!r} in a session")
        if request.method != METHODS[path]:
            raise HttpError(405, f"{path} takes {METHODS[path]}")
        if path == "v1/models":
            return json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})
        if path == "v1/chat/completions":
            return await self._answer(session, request, parse_chat(request.json_object()))
        if path == "v1/responses":
            asked = parse_responses(request.json_object(), lambda name: _earlier(session, name))
            return await self._answer(session, request, asked.chat, asked)
        return await self._score(session, request, path)

    @staticmethod
    async def _answer(
        session: Session, request: HttpRequest, chat: ChatRequest, asked: ResponsesRequest | None = None
    ) -> HttpResponse:
        """Answer a request for chat completions, or what was `asked` for as one."""
        exchange = session.exchange(request, chat)
        deliver, lose = partial(session.deliver, exchange), partial(session.lose, exchange)
        return await http_response(exchange, asked, session.conversations, deliver, lose)

    @staticmethod
    async def _score(session: Session, request: HttpRequest, path: str) -> HttpResponse:
        if path == "close":
            await session.close()
            return json_response({"closed": True})
        value = request.json_object().get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_reward(value):
            raise HttpError(400, 'the body must be {"reward": NUMBER}', "reward")
        session.reward = float(value)
        return json_response({"reward": session.reward})


def _earlier(session: Session, name: str) -> Sequence[Message]:
    """Return the conversation of a stored response. Raises HttpError if there is none of this name."""
    if name not in session.conversations:
        raise HttpError(404, f"this session has stored no response {name[:80]!r}", "previous_response_not_found")
    return session.conversations[name]
