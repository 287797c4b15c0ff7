"""/score and /rerank, with models that read pairs, models that embed, and templates of pairs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import transformers

from quire.foundation.messages.from_engine import PoolingInfo
from quire.pooling_params import PoolingParams
from quire.serving.api import request_work
from quire.serving.api.pooling import pairs
from quire.text.similarities import max_sim
from quire.text.text_pairs import Pair, PairLimits
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.api.pooling.conftest import Served
from tests.api.pooling.pooler import EMBEDDER, pooled, pooling, write_bert_tokenizer
from tests.api.server import Server
from tests.checkpoints import write_tokenizer
from tests.executor.fake_pooling import SCORES

QUERY, DOCUMENTS = "what is the capital of france", ["paris is a big town", "it rains", "berlin is the capital"]
TEMPLATE = (
    "{% for m in messages if m.role == 'query' %}<q>{{ m.content }}</q>{% endfor %}"
    "{% for m in messages if m.role == 'document' %}<d>{{ m.content }}</d>{% endfor %}{{ instruction or '' }}"
)
SCORER = PoolingInfo(tasks=["score"], generates=False, labels=["LABEL_0"])


def by_transformers(directory: Path, query: str, document: str, **options: Any) -> tuple[list[int], bytes]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    found = tokenizer(query, document, return_token_type_ids=True, **options)
    return found["input_ids"], bytes(found["token_type_ids"])


def pair_score(directory: Path, query: str, document: str) -> float:
    tokens, types = by_transformers(directory, query, document)
    return float(pooled(tokens, PoolingParams(task="score"), SCORES, types)[0])


def model_directory(server: Server) -> Path:
    return Path(server._config.model.model)


def post(server: Server, path: str, **fields: Any) -> Any:
    answer = server.post(path, fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_a_cross_encoder_reads_pairs_as_transformers_makes_them(
    cross_encoder: Served, path: str, names: tuple[str, str]
) -> None:
    server, _ = cross_encoder
    directory = model_directory(server)
    body = post(server, path, **{names[0]: QUERY, names[1]: DOCUMENTS})
    assert [item["score"] for item in body["data"]] == [pair_score(directory, QUERY, text) for text in DOCUMENTS]
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    each = post(server, path, **{names[0]: DOCUMENTS, names[1]: DOCUMENTS[::-1]})
    pairs = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
    assert [item["score"] for item in each["data"]] == [pair_score(directory, *pair) for pair in pairs]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_orders_documents(cross_encoder: Served, path: str) -> None:
    server, engine = cross_encoder
    before = len(engine.adds)
    body = post(server, path, model="tiny", query=QUERY, documents=DOCUMENTS)
    scores = [pair_score(model_directory(server), QUERY, text) for text in DOCUMENTS]
    order = sorted(range(3), key=lambda place: -scores[place])
    assert [item["index"] for item in body["results"]] == order
    assert [item["relevance_score"] for item in body["results"]] == [scores[place] for place in order]
    assert [item["document"] for item in body["results"]] == [{"text": DOCUMENTS[place]} for place in order]
    assert body["usage"]["total_tokens"] == sum(add.prompt_len for add in engine.adds[before:])
    assert body["model"] == "tiny"
    fewer = post(server, path, query=QUERY, documents=[{"text": text} for text in DOCUMENTS], top_n=2)
    assert [item["index"] for item in fewer["results"]] == order[:2]
    parts = {"content": [{"type": "text", "text": DOCUMENTS[0]}]}
    bare = post(server, path, query={"text": QUERY}, documents=[parts], return_documents=False, top_n=9)
    assert bare["results"] == [{"index": 0, "relevance_score": scores[0]}]


def test_pairs_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    write_bert_tokenizer(tmp_path)
    tokenizer, rng = load_tokenizer(tmp_path), random.Random(7)
    words = [*QUERY.split(), "paris", "rains"]
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(300):
        pair = tuple(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2))
        whole, side = rng.randint(4, 26), rng.choice(["left", "right"])
        reference.truncation_side = side
        found = reference(*pair, truncation="longest_first", max_length=whole, return_token_type_ids=True)
        (mine,) = tokenizer.encode_pairs([(pair[0], pair[1])], PairLimits(whole, cut_side=side))
        assert mine == (found["input_ids"], found["token_type_ids"]), (pair, whole, side)


def test_a_query_that_many_documents_repeat_has_a_limit(cross_encoder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    server, engine = cross_encoder
    before = len(engine.adds)
    monkeypatch.setattr(request_work, "MAX_TOKENS", 100)
    refused = server.post("/rerank", {"query": "it rains " * 20, "documents": ["paris"] * 4})
    assert refused.status_code == 400
    assert "send several requests" in refused.json()["error"]["message"]
    assert len(engine.adds) == before


def test_pairs_are_cut_when_asked_and_only_then(cross_encoder: Served) -> None:
    server, engine = cross_encoder
    directory, long = model_directory(server), "it rains " * 400
    refused = server.post("/rerank", {"query": QUERY, "documents": ["paris", long]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "documents[1]"
    assert "809 tokens" in refused.json()["error"]["message"]
    assert "512 tokens" in refused.json()["error"]["message"]
    post(server, "/rerank", query=QUERY, documents=long, truncate_prompt_tokens=-1)
    tokens, types = by_transformers(directory, QUERY, long, truncation=True, max_length=512)
    assert (engine.adds[-1].tokens, engine.adds[-1].token_types) == (tokens, types)
    post(server, "/rerank", query=QUERY, documents=long, max_tokens_per_doc=3, max_tokens_per_query=2)
    tokens, _ = by_transformers(directory, "what is", "it rains it")
    assert engine.adds[-1].tokens == tokens


def test_a_long_query_is_encoded_once_for_many_documents(
    cross_encoder: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engine = cross_encoder
    tokenizer = load_tokenizer(model_directory(server))
    long, documents, encoded = "it rains " * 20_000, ["paris is a big town"] * 300, list[int]()
    encode_pairs = Tokenizer.encode_pairs

    def count(self: Tokenizer, pairs: Sequence[Pair], limits: PairLimits) -> Any:
        encoded.append(sum(map(len, {text for pair in pairs for text in pair})))
        return encode_pairs(self, pairs, limits)

    monkeypatch.setattr(Tokenizer, "encode_pairs", count)
    sides: tuple[Literal["left", "right"], ...] = ("left", "right")
    for side in sides:
        encoded.clear()
        post(server, "/rerank", query=long, documents=documents, truncate_prompt_tokens=-1, truncation_side=side)
        assert sum(encoded) < len(long)
        (expected,) = encode_pairs(tokenizer, [(long, documents[0])], PairLimits(512, cut_side=side))
        assert (engine.adds[-1].tokens, list(engine.adds[-1].token_types)) == expected


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_models_that_embed_score_by_the_cosine(embedder: Served, path: str) -> None:
    server, engine = embedder
    before, tokenizer = len(engine.adds), server.text.tokenizer
    assert tokenizer is not None
    query, *documents = (
        pooled(tokenizer.encode(text), PoolingParams(task="embed"), EMBEDDER) for text in (QUERY, *DOCUMENTS)
    )
    cosines = [float(query @ text / np.linalg.norm(query) / np.linalg.norm(text)) for text in documents]
    if path == "/score":
        found = [item["score"] for item in post(server, path, text_1=QUERY, text_2=DOCUMENTS)["data"]]
    else:
        results = post(server, path, query=QUERY, documents=DOCUMENTS)["results"]
        found = [item["relevance_score"] for item in sorted(results, key=lambda item: item["index"])]
        assert [item["relevance_score"] for item in results] == sorted(found, reverse=True)
    assert found == pytest.approx(cosines, abs=1e-6)
    assert len(engine.adds) - before == 4, "each text is computed once"


@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
def test_a_models_files_may_name_another_similarity(tmp_path: Path, similarity: str) -> None:
    info = msgspec.structs.replace(EMBEDDER, similarity=similarity)
    with pooling(tmp_path, info) as (server, _):
        tokenizer = server.text.tokenizer
        assert tokenizer is not None
        params = PoolingParams(task="embed", use_activation=False)
        query, text = (
            pooled(tokenizer.encode(each), params, info).astype(np.float64) for each in (QUERY, DOCUMENTS[0])
        )
        expected = {
            "dot": query @ text,
            "euclidean": -np.linalg.norm(query - text),
            "manhattan": -np.abs(query - text).sum(),
        }
        (item,) = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False)["data"]
        assert item["score"] == pytest.approx(float(expected[similarity]))


def test_models_with_a_vector_for_each_token_score_by_max_sim(tmp_path: Path) -> None:
    info = PoolingInfo(tasks=["token_embed"], generates=False, dim=16)
    with pooling(tmp_path, info) as (server, _):
        tokenizer = server.text.tokenizer
        assert tokenizer is not None
        rows = [pooled(tokenizer.encode(t), PoolingParams(task="token_embed"), info) for t in (QUERY, *DOCUMENTS)]
        found = [item["score"] for item in post(server, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
        expected = [sum(max(float(q @ d) for d in text) for q in rows[0]) for text in rows[1:]]
        assert found == pytest.approx(expected, abs=1e-5)


def test_max_sim_of_long_texts_holds_few_products() -> None:
    rng = np.random.default_rng(3)
    query, document = rng.standard_normal((3_000, 8)), rng.standard_normal((4_000, 8))
    expected = float((query @ document.T).max(axis=1).sum())
    tracemalloc.start()
    try:
        assert max_sim(query, document) == pytest.approx(expected)
        assert tracemalloc.get_traced_memory()[1] < query.shape[0] * document.shape[0] * 8 / 4
    finally:
        tracemalloc.stop()


def test_a_template_of_pairs_makes_one_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pooling(tmp_path, SCORER) as (server, engine):
        tokenizer = server.text.tokenizer
        assert tokenizer is not None
        post(server, "/rerank", query="a", documents=["b", "cc"], instruction="be kind")
        sent = [tokenizer.decode(add.tokens) for add in engine.adds]
        assert sent == ["<q>a</q><d>b</d>be kind", "<q>a</q><d>cc</d>be kind"]
        post(server, "/score", text_1="a", text_2="b", chat_template_kwargs={"instruction": "now"})
        assert tokenizer.decode(engine.adds[-1].tokens) == "<q>a</q><d>b</d>now"


def test_one_piece_of_texts_that_a_template_makes_is_held_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the query as often as there are documents: that would be gigabytes."""
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    held = list[int]()
    made = pairs._as_texts

    def count(*arguments: Any, **options: Any) -> list[str]:
        texts = made(*arguments, **options)
        held.append(sum(map(len, texts)))
        return texts

    monkeypatch.setattr(pairs, "_as_texts", count)
    long, documents = "it rains " * 50_000, ["paris"] * 100
    with pooling(tmp_path, SCORER) as (server, engine):
        refused = server.post("/rerank", {"query": long, "documents": documents})
        assert refused.status_code == 400
        assert len(held) == 1, "the first piece shows that it is too long"
        post(server, "/rerank", query=long, documents=documents, truncate_prompt_tokens=20)
        assert len(engine.adds) == 100
    assert max(held) < 2 * len(long)


def test_a_template_of_pairs_may_be_a_setting_and_others_do_not_count(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)  # with a chat template, which has no roles of a pair
    with pooling(tmp_path, SCORER) as (server, engine):
        post(server, "/score", text_1="a question", text_2="an answer")
        tokenizer = server.text.tokenizer
        assert tokenizer is not None
        assert tokenizer.decode(engine.adds[-1].tokens) == "a questionan answer", "one behind the other, as in vLLM"
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    with pooling(tmp_path, SCORER, chat_template=str(tmp_path / "pairs.jinja")) as (server, engine):
        post(server, "/score", text_1="a", text_2="b")
        assert server.text.tokenizer is not None
        assert server.text.tokenizer.decode(engine.adds[-1].tokens) == "<q>a</q><d>b</d>"


def test_models_with_several_labels_do_not_score(classifier: Served) -> None:
    server, _ = classifier
    answer = server.post("/score", {"text_1": "a", "text_2": "b"})
    assert answer.status_code == 400
    assert "/classify" in answer.json()["error"]["message"]


def test_lowercased_models_read_lowercased_pairs(tmp_path: Path) -> None:
    with pooling(tmp_path, msgspec.structs.replace(SCORER, lowercases=True)) as (server, engine):
        post(server, "/score", text_1="A Question", text_2="An Answer")
        assert server.text.tokenizer is not None
        assert server.text.tokenizer.decode(engine.adds[-1].tokens) == "a questionan answer"
