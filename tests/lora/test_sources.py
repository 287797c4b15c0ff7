"""Adapters from S3 (moto's server on this machine) and from the hub's cache, and what is said where there are none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import huggingface_hub.constants
import pytest
import torch
from moto.server import ThreadedMotoServer

from quire.errors import CheckpointError, ModelNotFoundError
from quire.models.lora.files import read_adapter
from quire.models.lora.sources import AdapterSources
from quire.models.weights.hub import HubAccess
from tests.lora.adapter_files import Base, small_updates, write

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server's URL."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def endpoint(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, as boto3 finds it."""
    for name, value in (
        ("AWS_ENDPOINT_URL", server),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path) -> Iterator[str]:
    """With the adapter `poets/keats`, and `poets/half` that lacks its weights."""
    client, own = boto3.client("s3"), write(tmp_path / "own")
    client.create_bucket(Bucket="adapters")
    for file in FILES:
        client.upload_file(str(own / file), "adapters", f"poets/keats/{file}")
    client.upload_file(str(own / FILES[0]), "adapters", f"poets/half/{FILES[0]}")
    yield "adapters"
    client.close()


def digest(sources: AdapterSources, path: str) -> str:
    with sources.directory(path) as directory:
        return read_adapter(directory, small_updates(), torch.float32, Base).digest


@pytest.mark.parametrize("slash", ["", "/"])
def test_an_adapter_of_s3_is_the_one_that_was_put_there(bucket: str, tmp_path: Path, slash: str) -> None:
    sources = AdapterSources(HubAccess())
    assert digest(sources, f"s3://{bucket}/poets/keats{slash}") == digest(sources, str(tmp_path / "own"))
    with sources.directory(f"s3://{bucket}/poets/keats") as directory:
        assert sorted(each.name for each in directory.iterdir()) == sorted(FILES)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3://adapters/poets/nobody", "has no adapter_config.json"),
        ("s3://adapters/poets/half", "has no adapter_model.safetensors"),
        ("s3://elsewhere/poets", "NoSuchBucket|has no adapter_config.json"),
        ("s3://adapters", "write s3://bucket/key"),
        ("s3:///poets", "write s3://bucket/key"),
        ("s3://adapters/poets?x=1", "write s3://bucket/key"),
        ("s3://a_b*/poets", "could not be fetched"),
    ],
)
def test_what_s3_does_not_have_is_refused_by_name(bucket: str, path: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as refused, AdapterSources(HubAccess()).directory(path):
        pass
    assert path in refused.value.message


def test_a_server_that_is_not_there_is_an_error_that_says_so(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with (
        pytest.raises(CheckpointError, match="could not be fetched"),
        AdapterSources(HubAccess()).directory("s3://adapters/poets/keats"),
    ):
        pass


def test_credentials_that_are_missing_are_an_error_that_says_so(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with (
        pytest.raises(CheckpointError, match="credentials"),
        AdapterSources(HubAccess()).directory("s3://adapters/poets/keats"),
    ):
        pass


def cached(cache: Path, directory: Path, repo: str) -> None:
    """Lay files where huggingface_hub keeps what it has downloaded."""
    commit = "0" * 40
    own = cache / f"models--{repo.replace('/', '--')}"
    (own / "refs").mkdir(parents=True)
    (own / "refs" / "main").write_text(commit)
    shutil.copytree(directory, own / "snapshots" / commit)


def test_a_hub_id_is_found_in_the_cache_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    own, cache = write(tmp_path / "own"), tmp_path / "cache"
    cached(cache, own, "poets/keats")
    sources = AdapterSources(HubAccess(download_dir=str(cache)))
    assert digest(sources, "poets/keats") == digest(sources, str(own))
    with (
        pytest.raises(ModelNotFoundError, match="'poets/nobody' is not in the local cache"),
        sources.directory("poets/nobody"),
    ):
        pass


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="is no path of an adapter"), AdapterSources(HubAccess()).directory(path):
        raise AssertionError("it was found")


def test_a_directory_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poets").mkdir()
    own = write(tmp_path / "poets" / "keats")
    with AdapterSources(HubAccess(download_dir=str(tmp_path / "none"))).directory("poets/keats") as directory:
        assert directory.resolve() == own.resolve()
    for path in ("/nowhere/at/all", "nowhere", "../poets", "a/b/c"):
        with AdapterSources(HubAccess()).directory(path) as directory:
            assert directory == Path(path)
