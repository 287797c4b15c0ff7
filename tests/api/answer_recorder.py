"""Notes what an application answers, for checks when a test has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BYTES = 2**20
"""So much of a body is kept, and the part that goes beyond it."""


@dataclass
class Answer:
    """What was answered to a request, so far."""

    method: str
    path: str
    status: int = 0
    content_type: str = ""
    ended: bool = False
    body: bytearray = field(default_factory=bytearray)


class AnswerRecorder:
    """An application that notes what another answers."""

    def __init__(self, app: ASGIApp, answers: list[Answer]) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        answer = Answer(scope["method"], path)
        self._answers.append(answer)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                answer.content_type = types[0].decode().partition(";")[0] if types else ""
            elif message["type"] == "http.response.body":
                if len(answer.body) <= MAX_BYTES:
                    answer.body += message.get("body", b"")
                answer.ended = not message.get("more_body")
            await send(message)

        await self._app(scope, receive, noting)
        return None
