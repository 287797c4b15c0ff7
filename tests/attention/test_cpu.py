"""The CPU backend on whole steps: rows of every length at once, on paged blocks, beside what others left there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.attention.backend import AttentionLayer, HeadRule, KVView, Rows
from quire.attention.cpu import CpuAttention
from tests.kernels.test_reference import attention

HEADS, KV_HEADS, D = 4, 2, 8


class Scene:
    """Sequences of random keys and values that grow step by step, and the backend that must agree with them."""

    def __init__(
        self,
        block_size: int,
        sequences: int,
        groups: tuple[int, ...] = (0,),
        windows: tuple[int | None, ...] = (None, None),
    ) -> None:
        self.size, self.groups, self.windows = block_size, groups, windows[: max(groups) + 1]
        self.generator = torch.Generator().manual_seed(0)
        shape = (len(groups), 1 + 40 * sequences, block_size, KV_HEADS, D)
        self.kv = torch.full((2, *shape), float("nan"))  # what earlier owners may have left
        self.kv[:, :, 0] = 0
        self.backend = CpuAttention(KVView(tuple(self.kv[0]), tuple(self.kv[1]), groups, self.windows, block_size))
        blocks = torch.randperm(40 * sequences, generator=self.generator) + 1
        self.tables = tuple(blocks.roll(g).view(sequences, 40) for g in range(max(groups) + 1))
        self.keys = [[torch.empty(0, KV_HEADS, D)] * len(groups) for _ in range(sequences)]
        self.values = [[torch.empty(0, KV_HEADS, D)] * len(groups) for _ in range(sequences)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def step(self, moves: dict[int, int]) -> None:
        """Move sequences forward by so many tokens, in this order, and compare every row with plain attention."""
        counts = np.array(list(moves.values()))
        rows = np.repeat(np.arange(len(moves)), counts)
        starts = [len(self.keys[s][0]) for s in moves]
        positions = torch.cat([start + torch.arange(n) for start, n in zip(starts, counts, strict=True)])
        self.backend.prepare(
            Rows(
                counts=counts,
                row_of_token=rows,
                bounds=np.array(starts),
                slot_of_token=torch.tensor(list(moves))[torch.from_numpy(rows)],
                starts=torch.tensor(starts),
                positions=positions,
                slots=torch.tensor(list(moves)),
                tables=self.tables,
            )
        )
        for layer in range(len(self.groups)):
            q, k, v = (self.normal(len(rows), heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = torch.empty(len(rows), HEADS, D)
            self.backend.run(AttentionLayer(layer, D**-0.5), torch.cat((q, k, v), 1), HeadRule(), out)
            for row, sequence in enumerate(moves):
                own = torch.from_numpy(rows == row)
                self.keys[sequence][layer] = torch.cat((self.keys[sequence][layer], k[own]))
                self.values[sequence][layer] = torch.cat((self.values[sequence][layer], v[own]))
                window = self.windows[self.groups[layer]]
                expected = attention(q[own], self.keys[sequence][layer], self.values[sequence][layer], window=window)
                torch.testing.assert_close(out[own].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_rows_of_all_lengths(block_size: int) -> None:
    scene = Scene(block_size, 4)
    scene.step({2: 5})
    scene.step({0: 1, 2: 1, 3: 30})
    scene.step({3: 1, 1: 64, 2: 12, 0: 1})
    scene.step({0: 1, 1: 1, 2: 1, 3: 1})
    scene.step({1: 1, 0: 31})


def test_single_tokens_cross_into_new_blocks() -> None:
    scene = Scene(8, 2)
    scene.step({0: 6, 1: 7})
    for _ in range(12):
        scene.step({1: 1, 0: 1})


def test_layers_of_different_groups_use_their_own_tables() -> None:
    scene = Scene(8, 2, groups=(0, 1, 0))
    scene.step({0: 11, 1: 1})
    scene.step({1: 1, 0: 1})


def test_lengths_may_all_be_equal() -> None:
    scene = Scene(16, 3)
    scene.step({0: 9, 1: 9, 2: 9})
    scene.step({0: 1, 1: 1, 2: 1})


@pytest.mark.parametrize(("block_size", "window"), [(8, 1), (8, 8), (8, 13), (16, 16), (16, 40)])
def test_windows_see_their_last_tokens_and_no_block_before_them(block_size: int, window: int) -> None:
    """Blocks that nobody sees any more become NaN, as if others had written them, and tables go on naming them."""
    scene = Scene(block_size, 3, groups=(0, 1), windows=(window, None))
    for moves in ({0: 30, 1: 3}, {0: 1, 1: 1}, {2: 64, 0: 20, 1: 1}, {0: 1, 1: 9, 2: 1}, *[{0: 1, 1: 1, 2: 1}] * 12):
        for sequence in moves:
            left = max(0, len(scene.keys[sequence][0]) - window + 1) // block_size
            scene.kv[:, 0, scene.tables[0][sequence, :left]] = float("nan")
        scene.step(moves)
