"""`LLM.embed` against sentence-transformers itself: the files that it saves, and the vectors that it makes of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, PoolingParams
from tests.checkpoints import make_tiny, write_tokenizer
from tests.offline.test_pooling import EVERY_MODE, bert

pytestmark = pytest.mark.long("engine")
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "one",
    "Hello, how are you? I am fine, thank you. What is your name? " * 3,
    "Paris is the capital of France. The answer is 42.",
    "naïve café",
]
PROMPTS = {"query": "one two three: ", "document": ""}


def saved(directory: Path, modes: Sequence[str], *, include_prompt: bool, dense: bool, encoder: bool) -> Path:
    """A model that sentence-transformers has put together and saved."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer

    base = (
        bert(directory / "base", "BertModel") if encoder else make_tiny(directory / "base", "Qwen3Model", head_dim=16)
    )
    if not encoder:
        write_tokenizer(base)
    (base / "chat_template.jinja").unlink()  # else every text would be put into it
    transformer = Transformer(str(base), max_seq_length=120)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=tuple(modes), include_prompt=include_prompt)
    modules: list[Any] = [transformer, pooling]
    if dense:
        modules += [Dense(pooling.get_embedding_dimension(), 32), LayerNorm(32), Normalize()]
    model = SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
    model.save(str(directory / "saved"))
    return directory / "saved"


@pytest.mark.parametrize(
    ("modes", "include_prompt", "dense", "encoder"),
    [
        *(([mode], True, False, False) for mode in EVERY_MODE),
        *(
            (*case, encoder)
            for encoder in (False, True)
            for case in (
                (["mean"], False, True),
                (["cls", "weightedmean"], False, False),
                (["mean", "max", "lasttoken"], True, True),
            )
        ),
    ],
    ids=str,
)
def test_vectors_are_those_of_sentence_transformers(
    modes: list[str], include_prompt: bool, dense: bool, encoder: bool, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    directory = saved(tmp_path, modes, include_prompt=include_prompt, dense=dense, encoder=encoder)
    reference = SentenceTransformer(str(directory), device="cpu")
    chunk = 128 if encoder else 24
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=chunk) as llm:
        for name in PROMPTS:
            expected = reference.encode(TEXTS, prompt_name=name, batch_size=1)
            found = [each.outputs.embedding for each in llm.embed(TEXTS, prompt_name=name, use_tqdm=False)]
            norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
            assert np.all((found * expected).sum(1) / norms >= 0.999999), (modes, name)
            np.testing.assert_allclose(np.linalg.norm(found, axis=1), np.linalg.norm(expected, axis=1), rtol=1e-3)


def test_vectors_are_cut_like_those_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    directory = saved(tmp_path, ["mean"], include_prompt=True, dense=True, encoder=False)
    reference = SentenceTransformer(str(directory), device="cpu", truncate_dim=8).encode(
        TEXTS, normalize_embeddings=True
    )
    with LLM(str(directory), dtype="float32", hf_overrides={"is_matryoshka": True}) as llm:
        found = llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    np.testing.assert_allclose([each.outputs.embedding for each in found], reference, atol=1e-5)
