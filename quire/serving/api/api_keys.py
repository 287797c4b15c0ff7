"""API keys: where a request carries one, and which of the known ones it is. Only their digests are kept."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers


def key_in(headers: Headers) -> str:
    """The key of a request; empty without one."""
    return given_key(headers.get("authorization"), headers.get("x-api-key"))


def given_key(authorization: str | None, x_api_key: str | None) -> str:
    """The key in the headers of these names. Anthropic's clients send it in the second."""
    if authorization is None:
        return (x_api_key or "").strip()
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def digest_of(key: str) -> bytes:
    """SHA-256: what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def find_digest(digest: bytes, known: Sequence[bytes]) -> int | None:
    """The place among the known ones, or None. Takes as long whichever it is."""
    found = None
    for place, other in enumerate(known):  # all of them: the time must not depend on which one is similar
        if hmac.compare_digest(other, digest):
            found = place
    return found
