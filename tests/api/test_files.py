"""/v1/files with the official client, and with uploads that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types import FileObject

from tests.api.openai_types import check, unknown_fields
from tests.api.server import Server, running

DATA = b'{"custom_id": "1"}\n' * 40_000  # 760 KB: several parts, and more than is kept in memory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"responses_store_max_file_bytes": 2**20, "responses_store_max_bytes": 4 * 2**20}
    with running(tmp_path_factory.mktemp("files"), max_request_bytes=2**16, **limits) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    yield client
    for file in client.files.list():
        client.files.delete(file.id)


def test_a_file_is_uploaded_listed_read_and_deleted(client: openai.OpenAI, server: Server) -> None:
    file = client.files.create(file=("in.jsonl", DATA), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.status) == ("in.jsonl", len(DATA), "batch", "processed")
    raw = server.get(f"/v1/files/{file.id}").json()
    assert unknown_fields(check(FileObject, raw)) == []
    assert client.files.retrieve(file.id) == file
    assert [each.id for each in client.files.list(purpose="batch")] == [file.id]
    assert client.files.content(file.id).content == DATA
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="expired or been deleted"):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(file.id)


def test_files_are_listed_page_by_page(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{i}", b"x"), purpose="batch").id for i in range(5)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == made
    assert [file.id for file in client.files.list(limit=2)] == made[::-1]


def test_a_file_may_expire_earlier(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="3600"):
        client.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 60})


def test_a_file_larger_than_its_limit_is_refused_and_leaves_nothing(client: openai.OpenAI, server: Server) -> None:
    for size in (2**20 + 1, 4 * 2**20):
        with pytest.raises(openai.APIStatusError) as error:
            client.files.create(file=("big", b"x" * size), purpose="batch")
        assert error.value.status_code == 413
    assert list(client.files.list()) == []
    assert server.post("/v1/completions", {"prompt": "x" * 2**17}).status_code == 413  # others have the usual limit


def test_a_full_store_says_so_and_takes_files_again_when_there_is_room(client: openai.OpenAI) -> None:
    made: list[str] = []

    def fill() -> None:
        while len(made) < 9:
            made.append(client.files.create(file=(f"{len(made)}", b"x" * 700_000), purpose="batch").id)

    with pytest.raises(openai.APIStatusError, match="--responses-store-max-bytes") as error:
        fill()
    assert error.value.status_code == 413
    assert 4 <= len(made) <= 6
    client.files.delete(made[0])
    client.files.create(file=("again", b"x" * 700_000), purpose="batch")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"json": {"purpose": "batch"}}, 415, "multipart/form-data"),
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400, "'file' is required"),
        ({"data": {"purpose": "batch", "file": "text"}, "files": {"other": b"x"}}, 400, "'file' is required"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose must be 'batch'"),
        ({"files": {"file": b"x"}}, 400, "purpose must be 'batch'"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, 400, "Too many files"),
        ({"content": b"no form", "headers": {"Content-Type": "multipart/form-data"}}, 400, "boundary"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, ""),
    ],
)
def test_wrong_uploads_are_refused(server: Server, options: dict, status: int, words: str) -> None:
    answer = server.http.post(server.url + "/v1/files", **options)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert server.get("/v1/files").json()["data"] == []


def test_wrong_pages_are_refused_in_openais_words(server: Server) -> None:
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")):
        answer = server.get(f"/v1/files?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.get("/v1/files?after=file-none").status_code == 404


def test_without_a_store_there_are_no_files(tmp_path: Path) -> None:
    with running(tmp_path, disable_responses_store=True) as server:
        answer = server.get("/v1/files")
        assert answer.status_code == 400
        assert "--disable-responses-store" in answer.json()["error"]["message"]
    assert not (tmp_path / "store").exists()
