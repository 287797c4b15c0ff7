"""One server of each kind of model, for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.pooling.pooler import EMBEDDER, Pooler, pooling, write_bert_tokenizer
from tests.api.server import Server
from tests.executor.fake_pooling import CLASSIFIES, SCORES

Served = tuple[Server, Pooler]


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pooling(tmp_path_factory.mktemp("embedder"), EMBEDDER) as served:
        yield served


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pooling(tmp_path_factory.mktemp("classifier"), CLASSIFIES) as served:
        yield served


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("cross_encoder")
    write_bert_tokenizer(directory)
    with pooling(directory, SCORES) as served:
        yield served
