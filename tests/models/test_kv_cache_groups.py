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
from quire.scheduling.kvcache.cache_groups import KVCacheGroup
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


def groups_of(windows: Sequence[int | None], chunk: int | None = None) -> tuple[KVCacheGroup, ...]:
    """Groups of layers with these windows; a layer without one has chunks."""
    return kv_groups(
        [AttentionSpec(8, 8, 2, 1, 4, window, None if window else chunk) for window in windows],
    )


def test_layers_of_equal_chunks_share_a_group() -> None:
    assert groups_of([7, None], chunk=8) == (KVCacheGroup((0,), 7), KVCacheGroup((1,), chunk=8))
    assert groups_of([None] * 2, chunk=8) == (KVCacheGroup((0, 1), chunk=8),)


def test_groups_have_equally_many_layers() -> None:
    assert groups_of([None] * 3) == (KVCacheGroup((0, 1, 2)),)
    assert groups_of([7] * 3) == (KVCacheGroup((0, 1, 2), 7),)
    assert groups_of([7, None] * 2) == (KVCacheGroup((0, 2), 7), KVCacheGroup((1, 3)))
    five_to_one = groups_of(([7] * 5 + [None]) * 2)
    assert [(len(group.layers), group.window) for group in five_to_one] == [(2, 7)] * 5 + [(2, None)]
    assert sorted(layer for group in five_to_one for layer in group.layers) == list(range(12))


def test_the_last_group_of_a_kind_may_be_smaller() -> None:
    groups = groups_of([7] * 7 + [None] * 2)
    assert [len(group.layers) for group in groups] == [2, 2, 2, 1, 2]


def test_there_are_not_too_many_groups() -> None:
    groups = groups_of([7] * 61 + [None])
    assert len(groups) <= MAX_GROUPS + 1
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))
