"""Search with a real encoder: headings of an installed package's documentation against its paragraphs.

RETRIEVAL_PARAGRAPHS=3000 takes three times as many of both, and as long.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from tests.real_weights.packages import MINILM

pytestmark = pytest.mark.long("engine")
PARAGRAPHS, BEST = int(os.environ.get("RETRIEVAL_PARAGRAPHS", "1000")), 10
HEADINGS = PARAGRAPHS // 10


def sections() -> Iterator[tuple[str, list[str]]]:
    """NumPy's docstrings in the order of its files: the first line as a heading, and the paragraphs below."""
    folder = Path(np.__file__).parent
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).parts):
        if "tests" in file.relative_to(folder).parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                heading, *paragraphs = (" ".join(each.split()) for each in inspect.cleandoc(text).split("\n\n"))
                yield heading, paragraphs


def documentation() -> tuple[list[str], list[str], list[set[int]]]:
    """Headings, paragraphs, and which paragraphs stand below each heading. No text is there twice."""
    headings, paragraphs, below = list[str](), dict[str, int](), list[set[int]]()
    for heading, texts in sections():
        own = [text for text in dict.fromkeys(texts) if 40 < len(text) < 140 and text not in paragraphs]  # short: cheap
        first = len(paragraphs)
        paragraphs |= {text: first + number for number, text in enumerate(own)}
        if len(headings) < HEADINGS and len(own) > 1 and len(heading) > 20 and heading not in headings:
            headings.append(heading)
            below.append(set(range(first, first + len(own))))
        if len(headings) == HEADINGS and len(paragraphs) >= PARAGRAPHS:
            return headings, list(paragraphs)[:PARAGRAPHS], below
    pytest.fail(f"NumPy has {len(headings)} headings with {len(paragraphs)} paragraphs")


def vectors_of(llm: LLM, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    return np.array([each.outputs.embedding for each in outputs], dtype=np.float32)


def gain(found: Sequence[int], relevant: set[int]) -> float:
    """The normalised discounted cumulative gain of the best (Järvelin and Kekäläinen 2002)."""
    discounts = [1 / math.log2(place + 2) for place in range(BEST)]
    reached = sum(discount for place, discount in zip(found, discounts, strict=True) if place in relevant)
    return reached / sum(discounts[: len(relevant)])


def test_what_is_found_is_what_sentence_transformers_finds() -> None:
    from sentence_transformers import SentenceTransformer

    directory = str(MINILM.directory())
    headings, paragraphs, below = documentation()
    assert len(headings) == HEADINGS
    assert len(paragraphs) == PARAGRAPHS
    reference = SentenceTransformer(directory, device="cpu")
    theirs = reference.encode(headings) @ reference.encode(paragraphs).T
    with LLM(directory, dtype="float32") as llm:
        ours = vectors_of(llm, headings) @ vectors_of(llm, paragraphs).T
    best = [np.argsort(-scores, axis=1, kind="stable")[:, :BEST].tolist() for scores in (ours, theirs)]
    assert sum(own == other for own, other in zip(*best, strict=True)) >= 0.99 * HEADINGS
    means = [np.mean([gain(found, own) for found, own in zip(rows, below, strict=True)]) for rows in best]
    assert means[1] > 0.3, "headings find what stands below them"
    assert abs(means[0] - means[1]) <= 1e-4
