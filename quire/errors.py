"""Every error that Quire raises on purpose, with its HTTP status, its OpenAI error type and what to do next.

    QuireError
    ├── RequestError            400  the request is wrong: the message names the field and the fix
    │   ├── UnsupportedField    400  a field that OpenAI or vLLM knows and Quire does not serve yet
    │   ├── ContextLengthError  400  prompt and output do not fit the model's context or the KV cache
    │   ├── AuthenticationError 401  no API key, or a wrong one
    │   ├── NotFoundError       404  no such route
    │   │   └── UnknownModelError 404  the server does not serve this model
    │   ├── PayloadTooLarge     413  the body is larger than the server reads
    │   └── SwapInProgressError 409  another model is being loaded already
    ├── SchemaMismatchError     422  a finished output breaks what no grammar enforces of its schema
    ├── OverloadedError         429  too many requests wait: try again after the time that it names
    ├── RequestTimeoutError     504  it was not begun within the time it was given
    ├── UnavailableError        503  try again: starting, draining, or the engine is being restarted
    ├── GenerationError         500  one request failed inside the engine; the others go on
    ├── EngineDeadError         500  the engine is gone
    └── SetupError              —    the process cannot start; `exit_code` tells the class apart
        ├── ConfigError         2    flags or arguments that cannot be meant
        ├── ModelNotFoundError  3    no such directory or hub id
        ├── CheckpointError     4    the model's files are broken, missing or not of a supported kind
        ├── MemoryBudgetError   5    the model or its KV cache does not fit
        └── AddressInUseError   6    the port is taken

The tree is here, and how errors of other libraries are worded. Nothing here knows an HTTP framework.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, ClassVar

_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")


class QuireError(Exception):
    """Root of the tree. The message says what is wrong and what to do next."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        """Restore an error as it is when it is copied, also in another process, whatever its class is made from."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[QuireError], args: tuple[str, ...], attributes: dict[str, Any]) -> QuireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class RequestError(QuireError, ValueError):
    """The request cannot be served as it stands; nothing was started for it."""

    status = 400
    type = "invalid_request_error"

    def rename(self, name: str) -> None:
        """Call the field by the client's name: in `param`, and at the beginning of the message."""
        if self.param is None or name == self.param:
            return
        self.message = re.sub(rf"^('?){re.escape(self.param)}(?!\w)", lambda match: match[1] + name, self.message)
        self.args, self.param = (self.message,), name


class UnsupportedField(RequestError):
    """A known field that this version does not serve. `param` names it."""

    code = "unsupported_parameter"

    def __init__(self, param: str, advice: str = "leave it out") -> None:
        super().__init__(f"'{param}' is not supported yet: {advice}.", param=param)


class ContextLengthError(RequestError):
    """Prompt plus output exceed the model's context length or what the KV cache can ever hold.

    Args:
        prompt_tokens: Tokens of the prompt.
        longest: Maximum tokens of a sequence, prompt and output together.
        asked: Tokens of output that were asked for; None if the prompt alone is too long.
        param: The field that asked for them.
        at_least: Whether the prompt was not counted to its end.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        prompt_tokens: int,
        longest: int,
        *,
        asked: int | None = None,
        param: str = "prompt",
        at_least: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.longest = longest
        self.asked = asked
        self._at_least = at_least
        super().__init__(self._said_of(param), param=param)

    def rename(self, name: str) -> None:
        self.message, self.param = self._said_of(name), name
        self.args = (self.message,)

    def _said_of(self, field: str) -> str:
        """The message. Clients search it for "maximum context length is … tokens"."""
        many = f"{'at least ' if self._at_least else ''}{self.prompt_tokens} tokens"
        if self.asked is not None:
            room = self.longest - self.prompt_tokens
            return (
                f"The prompt has {many} and {field} is {self.asked}; the maximum context length is {self.longest} "
                f"tokens. Shorten the prompt or lower {field} to {room}."
            )
        behind = " and must leave room for an answer" if self.prompt_tokens <= self.longest else ""
        return (
            f"The prompt has {many}{behind}; the maximum context length is {self.longest} tokens. Shorten the prompt."
        )


class AuthenticationError(RequestError):
    """Missing or wrong API key."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """The model or route does not exist."""

    status = 404
    type = "not_found_error"


class UnknownModelError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class PayloadTooLarge(RequestError):
    """The request body is larger than the server reads."""

    status = 413
    code = "payload_too_large"


class SwapInProgressError(RequestError):
    """Another swap of models proceeds; there is one at a time."""

    status = 409
    code = "swap_in_progress"


class SchemaMismatchError(QuireError):
    """A finished output is not valid under its schema, which is not strict and was enforced as far as it can be."""

    status = 422
    type = "invalid_request_error"
    code = "schema_mismatch"


class OverloadedError(QuireError):
    """Too many requests wait; nothing was started for this one.

    Args:
        retry_after_s: When the queue will be short enough, in seconds.
    """

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(QuireError):
    """The request's time was over before it had any output."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class UnavailableError(QuireError):
    """The server cannot take work now (starting, draining); the same request may succeed later."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"


class GenerationError(QuireError):
    """This request failed inside the engine; no other request was touched."""

    code = "generation_failed"


class EngineDeadError(QuireError):
    """The engine is gone. Over HTTP only the server's log has the cause; `LLM` names it."""

    code = "engine_dead"


class SetupError(QuireError):
    """The process cannot start. The message is the whole story: cause, then one action."""

    exit_code: ClassVar[int] = 1


class ConfigError(SetupError, ValueError):
    """A flag or argument that cannot be meant, or two that contradict each other."""

    exit_code = 2


class ModelNotFoundError(SetupError):
    """The model is neither a directory here nor reachable on the hub."""

    exit_code = 3


class CheckpointError(SetupError):
    """The model's files are missing, broken, of a wrong shape or dtype, or of an unsupported kind."""

    exit_code = 4


class MemoryBudgetError(SetupError):
    """Weights or KV cache do not fit into the memory there is."""

    exit_code = 5


class AddressInUseError(SetupError):
    """Another program listens on the address."""

    exit_code = 6


SETUP_ERRORS: dict[str, type[SetupError]] = {
    cls.__name__: cls
    for cls in (SetupError, ConfigError, ModelNotFoundError, CheckpointError, MemoryBudgetError, AddressInUseError)
}
"""By class name: the errors that a parent raises when a child process reports them."""


def reason(error: BaseException) -> str:
    """The message of a system's or library's error, as part of a sentence: its first line without error numbers."""
    own = error.strerror if isinstance(error, OSError) else None
    lines = _ERROR_NUMBER.sub("", own or str(error)).strip().splitlines()
    text = lines[0].rstrip(".") if lines else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return text[0].lower() + text[1:] if text[:2].istitle() else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence, after a space, about the known name that is spelled alike; empty if there is none."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
