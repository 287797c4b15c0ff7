"""The servers and keys, from flags and from a file that may change; and how many requests each key may send."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError, OverloadedError, reason
from quire.foundation.clock import Clock
from quire.foundation.config.router import RouterConfig
from quire.serving.api.auth import digest_of

_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MINUTE_S = 60.0


class BackendAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server of the list.

    Attributes:
        url: `scheme://host:port`, and the path under which it serves, without a slash at the end.
        drain: Whether it gets no new requests.
        api_key: Sent in place of the client's key; empty to send none, None to pass on the client's.
        models: Names of models to send it; empty for those of its /v1/models.
    """

    url: str
    drain: bool = False
    api_key: str | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyLimits:
    """A key of the router's clients, by its SHA-256 `digest`, and its limits, of which None is no limit. The name is
    shown in logs and metrics, and told to servers under --tenant-header."""

    name: str
    digest: bytes
    requests_per_minute: int | None
    max_concurrent_requests: int | None


@dataclass(frozen=True)
class BackendList:
    """All servers, each URL once, and all keys; without keys, everybody may send requests."""

    backends: tuple[BackendAddress, ...]
    keys: tuple[KeyLimits, ...]


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    key: str | None = None
    key_sha256: str | None = None
    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    backends: tuple[BackendAddress, ...] = ()
    keys: tuple[_KeyEntry, ...] = ()


def read_backend_list(config: RouterConfig) -> BackendList:
    """The servers and keys of flags and file. The file is read again at each call. Raises ConfigError if the file or an
    address in it cannot be used, or there is no server at all."""
    file = _read_file(config.dynamic_config_yaml) if config.dynamic_config_yaml else _File()
    limits = (config.requests_per_minute, config.max_concurrent_requests)
    keys = [KeyLimits(f"key-{number}", digest_of(key), *limits) for number, key in enumerate(config.api_key, start=1)]
    keys += [_file_key(config, entry) for entry in file.keys]
    _check_names(keys)
    entries = [BackendAddress(url) for value in config.static_backends for url in value.split(",") if url.strip()]
    usual_key = config.backend_api_key or ("" if keys else None)  # keys of the router are no server's business
    backends = [
        msgspec.structs.replace(each, url=parse_url(each.url), api_key=each.api_key or usual_key)
        for each in (*entries, *file.backends)
    ]
    urls = [backend.url for backend in backends]
    if not urls:
        raise ConfigError("There is no server: give addresses by --static-backends or --dynamic-config-yaml.")
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ConfigError(f"The server {twice} is listed twice.")
    return BackendList(tuple(backends), tuple(keys))


def parse_url(url: str) -> str:
    """An address of the list, without a slash at the end. Raises ConfigError if it is no address of a server."""
    text = url.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good or parts.query or parts.fragment or parts.username or re.search(r"[^!-~]", text):
        raise ConfigError(f"'{url}' is no address of a server: write http://HOST:PORT.")
    return text.removesuffix("/v1")


def _read_file(path: str) -> _File:
    try:
        content = msgspec.yaml.decode(Path(path).read_bytes())
        return msgspec.convert({} if content is None else content, _File)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--dynamic-config-yaml {path} cannot be read: {reason(error)}.") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error


def _file_key(config: RouterConfig, entry: _KeyEntry) -> KeyLimits:
    if not _NAME.fullmatch(entry.name):
        raise ConfigError(f"'{entry.name[:80]}' is no name of a key: use 1 to 64 letters, digits or '._-'.")
    if (entry.key is None) == (entry.key_sha256 is None):
        raise ConfigError(f"The key '{entry.name}' needs either key or key_sha256.")
    if entry.key is not None and not entry.key.strip():
        raise ConfigError(f"The key '{entry.name}' is empty.")
    if entry.key_sha256 is not None and not _HEX_DIGEST.fullmatch(entry.key_sha256):
        raise ConfigError(f"key_sha256 of '{entry.name}' must be 64 hexadecimal digits.")
    limits = (entry.requests_per_minute, entry.max_concurrent_requests)
    if any(limit is not None and limit <= 0 for limit in limits):
        raise ConfigError(f"Limits of the key '{entry.name}' must be above 0.")
    return KeyLimits(
        entry.name,
        digest_of(entry.key) if entry.key is not None else bytes.fromhex(entry.key_sha256 or ""),
        entry.requests_per_minute or config.requests_per_minute,
        entry.max_concurrent_requests or config.max_concurrent_requests,
    )


def _check_names(keys: Sequence[KeyLimits]) -> None:
    names, digests = [key.name for key in keys], [key.digest for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"Two keys have the name '{twice}'.")
    if len(set(digests)) < len(digests):
        raise ConfigError("Two keys are the same: each client needs its own.")


@dataclass
class _Use:
    """Requests that a key may send now, as of `at`, and those that are open."""

    left: float
    at: float
    open: int = 0


class RateLimiter:
    """A token bucket for each key, which holds the requests of a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}

    def keep(self, keys: Sequence[KeyLimits]) -> None:
        """Let only these keys be valid now. What was counted for them stays."""
        known = {key.digest for key in keys}
        self._uses = {digest: use for digest, use in self._uses.items() if digest in known}

    def begin(self, key: KeyLimits) -> int | None:
        """Count a request, which has to `end`. Returns how many may follow at once; None for any number. Raises
        OverloadedError, whose `param` names the limit, if the key may send no request now."""
        now = self._clock.now()
        per_minute = key.requests_per_minute
        use = self._uses.setdefault(key.digest, _Use(per_minute or 0, now))
        if key.max_concurrent_requests is not None and use.open >= key.max_concurrent_requests:
            raise _over("max_concurrent_requests", f"{use.open} requests of this key are open, its most", 1)
        left = None
        if per_minute is not None:
            use.left = min(per_minute, use.left + (now - use.at) * per_minute / _MINUTE_S)
            use.at = now
            if use.left < 1:
                wait = math.ceil((1 - use.left) * _MINUTE_S / per_minute)
                raise _over("requests_per_minute", f"This key has sent its {per_minute} requests a minute", wait)
            use.left -= 1
            left = int(use.left)
        use.open += 1
        return left

    def end(self, key: KeyLimits) -> None:
        if (use := self._uses.get(key.digest)) is not None:
            use.open = max(0, use.open - 1)  # the key may have been out of the list meanwhile


def _over(limit: str, what: str, wait_s: int) -> OverloadedError:
    error = OverloadedError(f"{what}. Send it again in {wait_s} s.", retry_after_s=wait_s)
    error.param = limit
    return error
