"""`quire serve` of an encoder as users start it: its vectors are those of transformers, also while an engine dies."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.api.pooling.pooler import write_bert_tokenizer
from tests.e2e.serve import QuireServe

WORDS = ["what", "is", "the", "capital", "of", "france", "paris", "berlin", "a", "big", "town", "it", "rains"]
LONGEST = 128


def make_embedder(directory: Path) -> Any:
    """A tiny BertModel as sentence-transformers publishes one: the mean of all tokens, normalised. Returns the
    model of transformers."""
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LONGEST, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.save_pretrained(directory)
    write_bert_tokenizer(directory)
    names = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"}
        for at, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


@torch.inference_mode()
def expected(model: Any, directory: Path, texts: list[str]) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1).numpy()


@pytest.mark.long("api")
def test_vectors_are_those_of_transformers_while_an_engine_dies(tmp_path: Path) -> None:
    model, rng = make_embedder(tmp_path), random.Random(3)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(64)]
    flags = ["--dtype", "float32", "--data-parallel-size", "2", "--api-server-count", "2", "--served-model-name", "m"]
    with QuireServe(str(tmp_path), "--port", "0", *flags) as server:
        server.wait_ready()
        server.wait_line("/v1/embeddings")

        def embed(at: int) -> Any:
            answer = server.post("/v1/embeddings", {"model": "m", "input": texts[at : at + 8]})
            assert answer.status_code == 200, answer.text
            return [item["embedding"] for item in answer.json()["data"]]

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(embed, at) for _ in range(8) for at in range(0, len(texts), 8)]
            running[8].result()
            os.kill(server.all_children()["engine"][0], signal.SIGKILL)
            found = [np.array(each.result()) for each in running]
        vectors = np.concatenate(found).reshape(8, len(texts), -1)
        cosines = np.einsum("rtd,td->rt", vectors, expected(model, tmp_path, texts))
        assert cosines.min() > 0.999999
        refused = server.post("/v1/embeddings", {"input": "it rains " * LONGEST})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert f"{LONGEST} tokens" in refused.json()["error"]["message"]
        ranked = server.post("/rerank", {"query": texts[0], "documents": texts[:8], "top_n": 1}).json()["results"]
        assert (ranked[0]["index"], round(ranked[0]["relevance_score"], 5)) == (0, 1.0)
