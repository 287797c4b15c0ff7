"""Which layers have a window, and how they are put into groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError
from quire.models.kv_cache_groups import MAX_GROUPS, kv_groups
from quire.models.layer_spec import AttentionSpec
from quire.models.spec import read_spec
from quire.scheduling.kvcache.cache_groups import (
    FULL,
    CacheForm,
    CacheGroup,
    Chunk,
    Plane,
    Window,
    block_elements,
    block_parts,
)
from tests.models.test_spec import MINIMAL

SIX = {"num_hidden_layers": 6, "head_dim": 8}


def windows(directory: Path, architecture: str, **changes: Any) -> list[int | None]:
    (directory / "config.json").write_text(json.dumps(MINIMAL | SIX | {"architectures": [architecture]} | changes))
    spec = read_spec(directory)
    return [layer.mixer.window for layer in spec.layers]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {}, [None] * 6),
        ("MistralForCausalLM", {"sliding_window": 9}, [9] * 6),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 6),
        ("Phi3ForCausalLM", {"sliding_window": 9}, [9] * 6),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, [None] * 6),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": True}, [None] * 6),  # from layer 28 on
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 4},
            [None] * 4 + [9, 9],
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, [9] * 6),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": False, "layer_types": ["full_attention"] * 6, "sliding_window": None},
            [None] * 6,
        ),
        ("Qwen3MoeForCausalLM", {"sliding_window": 9, "use_sliding_window": True}, [9] * 6),
        ("Gemma2ForCausalLM", {"sliding_window": 9}, [9, None] * 3),
        ("Gemma3ForCausalLM", {"sliding_window": 9}, [9] * 5 + [None]),
        ("Gemma3ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None] * 2),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 9, "layer_types": ["full_attention"] + ["sliding_attention"] * 5},
            [None] + [9] * 5,
        ),
    ],
)
def test_which_layers_have_a_window(
    architecture: str, changes: dict[str, Any], expected: list[int | None], tmp_path: Path
) -> None:
    assert windows(tmp_path, architecture, **changes) == expected


def test_layers_of_one_kind_where_the_file_says_otherwise_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    for architecture in ("MistralForCausalLM", "LlamaForCausalLM"):
        with pytest.raises(CheckpointError, match=r"'layer_types'.*all of one kind"):
            windows(tmp_path, architecture, layer_types=kinds)
    with pytest.raises(CheckpointError, match=r"'layer_types'.*6 entries"):
        windows(tmp_path, "Gemma2ForCausalLM", layer_types=kinds[:5])


FORM = CacheForm((Plane("keys", (1, 4)), Plane("values", (1, 4))))


def groups_of(windows: Sequence[int | None], chunk: int | None = None) -> tuple[CacheGroup, ...]:
    """Groups of layers with these windows; a layer without one has chunks."""
    return kv_groups(
        [AttentionSpec(8, 8, 2, 1, 4, window, None if window else chunk) for window in windows],
    )


def test_layers_of_equal_chunks_share_a_group() -> None:
    assert groups_of([7, None], chunk=8) == (CacheGroup((0,), Window(7), FORM), CacheGroup((1,), Chunk(8), FORM))
    assert groups_of([None] * 2, chunk=8) == (CacheGroup((0, 1), Chunk(8), FORM),)


def test_groups_have_equally_many_layers() -> None:
    assert groups_of([None] * 3) == (CacheGroup((0, 1, 2), FULL, FORM),)
    assert groups_of([7] * 3) == (CacheGroup((0, 1, 2), Window(7), FORM),)
    assert groups_of([7, None] * 2) == (CacheGroup((0, 2), Window(7), FORM), CacheGroup((1, 3), FULL, FORM))
    five_to_one = groups_of(([7] * 5 + [None]) * 2)
    assert [(len(group.layers), group.reach) for group in five_to_one] == [(2, Window(7))] * 5 + [(2, FULL)]
    assert sorted(layer for group in five_to_one for layer in group.layers) == list(range(12))


def test_the_last_group_of_a_kind_may_be_smaller() -> None:
    groups = groups_of([7] * 7 + [None] * 2)
    assert [len(group.layers) for group in groups] == [2, 2, 2, 1, 2]


def test_there_are_not_too_many_groups() -> None:
    groups = groups_of([7] * 61 + [None])
    assert len(groups) <= MAX_GROUPS + 1
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))


def unequal_groups(kv_heads: Sequence[tuple[int | None, int]]) -> tuple[CacheGroup, ...]:
    """Groups of layers with these windows and numbers of KV heads, 4 wide."""
    return kv_groups([AttentionSpec(64, 64, 16, heads, 4, window) for window, heads in kv_heads])


@pytest.mark.parametrize(
    ("full", "windowed", "parts", "padding"),
    [
        ((10, 4), (50, 8), {10, 5}, 0),  # as Gemma 4 31B: ten full layers against groups of five
        ((5, 2), (25, 4), {6, 3}, 10),  # as its 26B: an even number of full layers
        ((3, 2), (12, 1), {3, 6}, 0),  # as its E2B
        ((4, 2), (20, 1), {2, 4}, 0),  # as its E4B
        ((9, 4), (39, 8), {10, 5}, 12),  # as MiMo-V2-Flash
        ((4, 3), (4, 2), {4, 6}, 4),
    ],
)
def test_blocks_of_unequal_layers_have_equal_bytes(
    full: tuple[int, int], windowed: tuple[int, int], parts: set[int], padding: int
) -> None:
    (number, heads), (others, of_others) = full, windowed
    groups = unequal_groups([(None, heads)] * number + [(7, of_others)] * others)
    assert set(block_parts(groups)) == parts
    block = block_elements(groups)
    assert all(each * group.form.elements == block for each, group in zip(block_parts(groups), groups, strict=True))
    assert all(len(group.layers) <= each for each, group in zip(block_parts(groups), groups, strict=True))
    assert sorted(layer for group in groups for layer in group.layers) == list(range(number + others))
    held = sum(len(group.layers) * group.form.elements for group in groups)
    assert len(groups) * block - held == padding * 8
    assert len(groups) <= MAX_GROUPS
