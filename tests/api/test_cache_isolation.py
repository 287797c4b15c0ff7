"""--cache-isolation: what one key's requests have cached is not found by another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.serving.app import create_app
from tests.api.server import Server, resolved, running

PROMPT = [7] * 100


@pytest.fixture(scope="module", params=[True, False], ids=["isolated", "shared"])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, bool]]:
    directory = tmp_path_factory.mktemp("model")
    with running(directory, api_key=("a", "b"), tenant_header="X-Tenant", cache_isolation=request.param) as server:
        yield server, request.param


def test_prefixes_are_shared_within_a_key_and_tenant_alone(serving: tuple[Server, bool]) -> None:
    server, isolated = serving

    def cached(key: str, salt: str | None = None, tenant: str = "") -> int:
        headers = {"Authorization": f"Bearer {key}", **({"X-Tenant": tenant} if tenant else {})}
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
        answer = server.post("/v1/completions", body, headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") == 0
    own = cached("a")
    assert own > 0
    assert cached("b") == (0 if isolated else own)
    assert cached("b") == own
    assert cached("a", tenant="t") == (0 if isolated else own)
    assert cached("a", salt="s") == 0  # a request's own salt counts beside it
    assert cached("a", salt="s") == own
    assert cached("b", salt="s") == (0 if isolated else own)


def test_without_keys_or_tenants_there_is_nothing_to_isolate(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cache-isolation needs --api-key or --tenant-header"):
        create_app(resolved(tmp_path, cache_isolation=True), server.session, server.text)
