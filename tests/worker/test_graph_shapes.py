"""Which captured shape serves which step, and how a step is padded to it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from quire.foundation.messages.workers import Plan
from quire.runtime.worker.graph_shapes import MAX_ROWS, GraphShape, GraphShapes, ShapeKind
from quire.runtime.worker.host_batch import HostBatch

DUMMY = 99


def test_decode_steps_have_the_smallest_number_of_rows_that_holds_them() -> None:
    shapes = GraphShapes(512, 200, 8192, 4096)
    assert [shapes.for_decode(rows) for rows in (1, 3, 33, 200)] == [GraphShape.decode(n) for n in (1, 4, 48, 200)]
    assert shapes.for_decode(201) is None
    assert GraphShapes(16, 200, 8192, 4096).for_decode(17) is None


def test_prompts_have_the_smallest_number_of_tokens_that_holds_them() -> None:
    shapes = GraphShapes(512, 256, 8192, 4096)
    for tokens, rows, decode_rows in [
        (2, 1, 0),
        (20, 1, 0),
        (200, 8, 0),
        (512, 1, 0),
        (50, 9, 0),
        (20, 3, 1),
        (160, 64, 60),
        (512, 128, 128),
        (110, 70, 69),
    ]:
        shape = shapes.for_prompts(tokens, rows, decode_rows)
        assert shape is not None
        assert shape.holds(tokens, rows, decode_rows)
        assert shape.tokens - tokens < 64
        assert not any(s.tokens < shape.tokens for s in shapes._with_prompts if s.holds(tokens, rows, decode_rows))
        assert bool(decode_rows or rows > 8) == (shape.decode_rows > 0)
    wide = shapes.for_prompts(300, 200, 190)
    assert wide is not None
    assert (wide.tokens, wide.sampled) == (384, 255)
    for tokens, rows, decode_rows in [(513, 1, 0), (512, 256, 1)]:
        assert shapes.for_prompts(tokens, rows, decode_rows) is None


@pytest.mark.parametrize("streams", [3, 40, 63, 64, 100, 127, 128, 200, 254, 255, 300])
def test_a_step_of_a_mixed_size_has_no_padding_of_tokens(streams: int) -> None:
    shapes = GraphShapes(512, 512, 8192, 4096)
    sizes = [size for size, rows in shapes.mixed_sizes(8192) if streams < rows and streams < size]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 8192
    for before, size in itertools.pairwise([streams + 1, *sizes]):
        shape = shapes.for_prompts(size, streams + 1, streams)
        assert (shape is None) == (size > 512 or streams > 254)
        assert shape is None or shape.tokens == size
        smaller = shapes.for_prompts(size - 1, streams + 1, streams)
        assert smaller == shape, "a size at which no more is computed"
        assert shape is not None or size - before <= 128


def test_sizes_of_steps_that_are_not_captured_are_whole_tiles_or_all_there_can_be() -> None:
    assert GraphShapes(0, 256, 300, 4096).mixed_sizes(300) == [(128, 256), (256, 256), (300, 256)]
    assert GraphShapes(0, 16, 100, 4096).mixed_sizes(100) == [(100, 16)], "never none: on a GPU not each token counts"


@pytest.mark.parametrize(
    ("most", "rows", "tokens", "length"),
    [(512, 1, 40, 40), (512, 62, 8192, 100), (2048, 1024, 8192, 9000), (0, 9, 9, 9)],
)
def test_shapes_fit_the_engine_and_each_other(most: int, rows: int, tokens: int, length: int) -> None:
    shapes = GraphShapes(most, rows, tokens, length).all()
    assert len(set(shapes)) == len(shapes)
    assert all(one.tokens >= other.tokens for one, other in itertools.pairwise(shapes))
    assert all(shape.tokens <= most and shape.sampled <= rows for shape in shapes)
    prompts = [shape for shape in shapes if not shape.is_decode]
    assert len(prompts) <= 21  # each takes some 20 ms to capture
    assert all(shape.tokens <= min(tokens, length, 512) for shape in prompts)
    assert all(shape.sampled + 2 <= shape.rows <= MAX_ROWS for shape in prompts)


def test_padding_belongs_to_the_dummy_slot() -> None:
    choose = random.Random(0)
    for _ in range(200):
        counts = [choose.choice([1, 1, 2, 7, 30]) for _ in range(choose.randint(1, 12))]
        sampled = sorted(choose.sample(range(len(counts)), choose.randint(0, len(counts))))
        shape = GraphShapes(512, 64, 8192, 900).for_prompts(sum(counts), len(counts), counts.count(1))
        assert shape is not None
        check_padded(counts, sampled, shape)
    for rows in (1, 5, 8):
        check_padded([1] * rows, list(range(rows)), GraphShape.decode(8))
    check_padded([16], [0], GraphShape.with_prompts(ShapeKind.PREFILL, 16, 8, 64))
    check_padded([15], [], GraphShape.with_prompts(ShapeKind.PREFILL, 16, 8, 64))


def check_padded(counts: list[int], sampled: list[int], shape: GraphShape) -> None:
    rows, tokens, slots = len(counts), sum(counts), list(range(3, 3 + len(counts)))
    plan = Plan(
        step=1,
        slots=slots,
        counts=counts,
        token_rows=list(range(rows)),
        tokens=[7] * tokens,
        sampled_rows=sampled,
    )
    host = HostBatch.of(plan, np.full(DUMMY, 40))
    whole = host.padded_to(shape, DUMMY)
    assert (len(whole.slots), len(whole.token_ids), len(whole.sampled_slots)) == (
        shape.rows,
        shape.tokens,
        shape.sampled,
    )
    assert len(whole.counts) == len(whole.max_lengths) == len(whole.first_tokens) == shape.rows
    assert len(whole.logits_indices) == shape.sampled
    assert whole.counts.sum() == shape.tokens == len(whole.row_of_token) == len(whole.offsets)
    assert whole.is_decode == shape.is_decode
    for name in (
        "slots",
        "counts",
        "max_lengths",
        "first_tokens",
        "row_of_token",
        "offsets",
        "token_ids",
        "logits_indices",
        "sampled_slots",
    ):
        own = getattr(host, name)
        assert getattr(whole, name)[: len(own)].tolist() == own.tolist(), name
    assert set(whole.slots[rows:]) <= {DUMMY} >= set(whole.sampled_slots[len(sampled) :])
    assert (whole.max_lengths[rows:] == 0).all()
    expected = [(row, offset) for row, count in enumerate(whole.counts) for offset in range(count)]
    assert list(zip(whole.row_of_token, whole.offsets, strict=True)) == expected
    if not shape.is_decode:
        assert whole.counts[-1] == 0
        assert (whole.counts[rows + 1 :] == 0).all()
