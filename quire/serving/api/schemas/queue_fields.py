"""The fields of every request that waits in an engine's queue, and who sent it."""

from __future__ import annotations

from typing import Any, Self

from pydantic import PrivateAttr

from quire.errors import RequestError
from quire.serving.api.auth import ANYBODY, Caller, check_timeout
from quire.serving.api.schemas.known_fields import AS_THEY_ARE, Body, FieldNames, optional
from quire.validation import integer

MAX_SALT = 1_024
"""Maximum number of characters of a salt."""
MAX_PRIORITY = 2**31 - 1


class QueueFields(Body):
    """Fields that say which model is asked, and how the request waits."""

    model: str | None = optional("A name from /v1/models; may be left out.")
    request_id: str | None = optional("Id of the request, unless X-Request-Id is sent.")
    timeout: float | None = optional("Seconds after which the answer ends with what there is; X-Request-Timeout, too.")
    priority: int | None = optional("Lower goes first, if the server orders by priority.")
    cache_salt: str | None = optional("Cached prefixes are shared within one salt only.")
    _caller: Caller = PrivateAttr(default_factory=lambda: ANYBODY)  # a default would be copied for each request
    _names: FieldNames = PrivateAttr(default_factory=lambda: AS_THEY_ARE)

    def sent_by(self, caller: Caller) -> Self:
        """Set who sent this request, and return the request. A timeout counts from the caller's `arrival`."""
        self._caller = caller
        return self

    def named(self, names: FieldNames) -> Self:
        """Set what the client of a dialect calls these fields, and return the request."""
        self._names = names
        return self

    @property
    def field_names(self) -> FieldNames:
        """What the client calls the fields, for errors."""
        return self._names

    @property
    def tenant(self) -> str:
        return self._caller.tenant

    def queue_options(self) -> dict[str, Any]:
        """The priority, salt, deadline, tenant, model and collectors, as arguments of `EngineSession.add_request`;
        raises RequestError if a value is out of its range."""
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT:
            raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT} characters.", param="cache_salt")
        timeout = None if self.timeout is None else check_timeout("timeout", self.timeout)
        return {
            "priority": integer("priority", self.priority or 0, -MAX_PRIORITY, MAX_PRIORITY),
            "cache_salt": self.cache_salt or "",
            "deadline": self._caller.deadline_after(timeout),
            "tenant": self.tenant,
            "collectors": self._caller.collectors,
            "model": self.model,
        }
