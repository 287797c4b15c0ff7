"""/docs and /redoc work without a network, and the document that they show is whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.api.server import Server, running

WITHOUT_BODY = ("/reset_prefix_cache", "/pause", "/resume")


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_everything_a_page_loads_comes_from_here(server: Server, page: str) -> None:
    answer = server.get(page)
    assert answer.status_code == 200
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)["']|url: '([^']+)'|spec-url="([^"]+)\"""", answer.text)
    targets = [next(filter(None, found)) for found in loaded]
    assert len(targets) >= 3
    for target in targets:
        assert not target.startswith(("http:", "https:", "//")), target
        assert server.http.get(urljoin(answer.url.__str__(), target)).status_code == 200, target
    assert "http" not in answer.headers["content-security-policy"]


def test_no_other_file_is_served(server: Server) -> None:
    for name in ("core.py", "..%2fcore.py", "%2e%2e%2fcore.py", "swagger-ui.css%00"):
        assert server.get(f"/docs/files/{name}").status_code == 404


def test_they_can_be_left_out(tmp_path: Path) -> None:
    with running(tmp_path, disable_fastapi_docs=True) as server:
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/files/swagger-ui.css"):
            assert server.get(path).status_code == 404


def test_every_body_is_in_the_document(server: Server) -> None:
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method == "post" and path not in WITHOUT_BODY and not path.endswith("/cancel"):
                assert "requestBody" in operation, path
    missing = [ref for ref in _refs(document) if ref.removeprefix("#/components/schemas/") not in schemas]
    assert missing == []


def _refs(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in _refs(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in _refs(value)]
    return []
