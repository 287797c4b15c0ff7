"""The KV cache of layers that cache different amounts of a token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.models.layer_spec import with_parts
from quire.models.spec import ModelSpec, read_spec
from quire.runtime.worker.kv_tensors import allocate_kv_cache, kv_view
from tests.checkpoints import make_llama

CPU = torch.device("cpu")


def unequal_model(directory: Path, head_dim: int) -> ModelSpec:
    """Six layers, of which two see everything with half as many KV heads, `head_dim` wide."""
    make_llama(directory, layers=6, tokenizer=False)
    spec = read_spec(directory)
    wide = with_parts(spec.layers[0], mixer={"heads": 4, "kv_heads": 2, "window": 7})
    narrow = with_parts(spec.layers[0], mixer={"heads": 4, "kv_heads": 1, "head_dim": head_dim})
    return replace(spec, layers=(wide, wide, narrow, wide, wide, narrow))


@pytest.mark.parametrize(("head_dim", "sizes"), [(16, [1, 1, 1, 1, 2]), (32, [2, 2, 2])])
def test_blocks_of_unequal_layers_never_overlap(head_dim: int, sizes: list[int], tmp_path: Path) -> None:
    """Each block is filled through the views of the layers of one group, and all of it is found again. Also if layers
    cache equally much in other shapes."""
    spec = unequal_model(tmp_path, head_dim)
    groups, entries = spec.kv_groups(), spec.block_entries
    assert [len(group.layers) for group in groups] == sizes
    assert entries == tuple(sizes)
    last = len(groups) - 1
    cache = allocate_kv_cache(spec, 4, 8, torch.float32, CPU)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * spec.kv_block_bytes("float32", 8)
    view, owners = kv_view(cache, spec), [0, 1, last, last - 1, last]  # the group that each block belongs to
    for block, owner in enumerate(owners):
        for layer in groups[owner].layers:
            for number, plane in enumerate(view.layers[layer][:2]):
                assert view.groups[layer] == owner
                assert plane.is_contiguous()
                plane[block * entries[owner]] = 100 * block + 10 * layer + number + 1
    for block, owner in enumerate(owners):
        for layer in groups[owner].layers:
            for number, plane in enumerate(view.layers[layer][:2]):
                assert bool((plane[block * entries[owner]] == 100 * block + 10 * layer + number + 1).all())
    assert all(bool(tensor.all()) for tensor in cache.tensors)  # nothing of a block is left out


def test_layers_that_are_alike_keep_tensors_of_their_own(tmp_path: Path) -> None:
    make_llama(tmp_path, layers=3, tokenizer=False)
    spec = read_spec(tmp_path)
    cache = allocate_kv_cache(spec, 4, 8, torch.float32, CPU)
    (tensor,), attention = cache.tensors, spec.attention
    assert tensor.shape[:4] == (3, 2, 5, 8)
    view = kv_view(cache, spec)
    assert [layer.keys.data_ptr() for layer in view.layers] == [tensor[n, 0].data_ptr() for n in range(3)]
    assert view.layers[0].keys.shape == (5, 8, attention.kv_heads, attention.head_dim)
