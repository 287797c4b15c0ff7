"""Every backend on whole steps: rows of every length at once, on paged blocks, beside what others left there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer, KVView, StepRows
from quire.compute.attention.cpu import CpuAttention
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata
from quire.compute.kernels.dispatch import KERNELS
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, QKNormRope, Scores
from quire.compute.kernels.reference.norm import rms_norm
from quire.compute.kernels.reference.rotary import rotary
from quire.compute.kernels.triton.attention.prefill import TileShape
from tests.kernels.test_reference import attention

HEADS, KV_HEADS, D = 4, 2, 8
MAX_ROWS, MAX_TOKENS = 8, 300
BLOCKS = 40
"""Of a sequence, at most."""


def view_of(kv: Tensor, groups: tuple[int, ...], windows: tuple[int | Mask | None, ...]) -> KVView:
    """Of keys and values [2, layers, blocks, block_size, kv_heads, d]."""
    layers = tuple(PagedKV(keys, values) for keys, values in zip(*kv, strict=True))
    return KVView(layers, groups, tuple(map(mask_of, windows)))


def mask_of(window: int | Mask | None) -> Mask:
    return window if isinstance(window, Mask) else Mask(window)


def cpu_backend(kv: KVView) -> AttentionBackend:
    return CpuAttention(kv)


def triton_backend(kv: KVView) -> AttentionBackend:
    from quire.compute.attention.triton import TritonAttention

    return TritonAttention(kv, HEADS, MAX_ROWS, MAX_TOKENS, 32 * BLOCKS)


def triton_backend_with_long_rows(kv: KVView) -> AttentionBackend:
    """As on a card of the Hopper generation, where the kernel that serves long rows can run; here the reference does,
    from a few tokens on."""
    from quire.compute.attention import triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.prefill_dense, "serves_dense_prefill", lambda device, dtype, d: Mask() in kv.masks)
        patch.setattr(triton, "DENSE_MIN_QUERIES", 5)
        patch.setitem(
            KERNELS,
            ("prefill_attention_dense", "cuda"),
            "quire.compute.kernels.reference.paged_attention:prefill_attention_dense",
        )
        return triton.TritonAttention(kv, HEADS, MAX_ROWS, MAX_TOKENS, 32 * BLOCKS)


BACKENDS = {"cpu": cpu_backend, "triton": triton_backend, "triton, long": triton_backend_with_long_rows}


class Scene:
    """Sequences of random keys and values that grow step by step, and the backend that must agree with them.

    The last slot is the dummy, whose table names block 0 only.
    """

    def __init__(
        self,
        backend: Callable[[KVView], AttentionBackend],
        device: str,
        block_size: int,
        sequences: int,
        groups: tuple[int, ...] = (0,),
        windows: tuple[int | Mask | None, ...] = (None, None),
        sinks: Tensor | None = None,
    ) -> None:
        self.sinks = None if sinks is None else sinks.to(device)
        self.size, self.groups, self.windows, self.device = block_size, groups, windows[: max(groups) + 1], device
        self.generator = torch.Generator().manual_seed(0)
        self.dummy = sequences
        shape = (len(groups), 1 + BLOCKS * sequences, block_size, KV_HEADS, D)
        self.kv = torch.full((2, *shape), float("nan"), device=device)  # what earlier owners may have left
        self.kv[:, :, 0] = 0
        self.backend = backend(view_of(self.kv, groups, self.windows))
        blocks = torch.randperm(BLOCKS * sequences, generator=self.generator) + 1
        lines = [blocks.roll(g).view(sequences, BLOCKS) for g in range(max(groups) + 1)]
        self.tables = tuple(torch.cat((own, torch.zeros_like(own[:1]))).to(device) for own in lines)
        self.keys = [[torch.empty(0, KV_HEADS, D)] * len(groups) for _ in range(sequences)]
        self.values = [[torch.empty(0, KV_HEADS, D)] * len(groups) for _ in range(sequences)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def length(self, sequence: int) -> int:
        return 0 if sequence == self.dummy else len(self.keys[sequence][0])

    def step(
        self,
        moves: dict[int, int],
        dummies: tuple[int, ...] = (),
        too_high: int = 0,
        limits: PaddedLimits | None = None,
    ) -> tuple[tuple[int, ...], ...]:
        """Move sequences forward by so many tokens, in this order, and compare every row with plain attention.

        Rows of the dummy slot stand behind them, of so many tokens each. The host's bounds are `too_high` for rows of
        one token. Returns the shapes of the metadata's columns.
        """
        sequences = [*moves, *[self.dummy] * len(dummies)]
        counts = np.array([*moves.values(), *dummies])
        rows = np.repeat(np.arange(len(sequences)), counts)
        starts = [self.length(sequence) for sequence in sequences]
        bounds = np.array(starts) + too_high * (counts == 1)
        slots = torch.tensor(sequences, device=self.device)
        offsets = torch.cat([torch.arange(n) for n in counts]).to(self.device)
        at = torch.tensor(starts, device=self.device)
        of_token = torch.from_numpy(rows).to(self.device)
        metadata = self.backend.build_metadata(counts, bounds, limits)
        shapes = []

        def copy(column: Tensor) -> Tensor:
            assert column.dtype == torch.int64
            assert column.dim() == 1
            shapes.append(tuple(column.shape))
            return column.to(self.device)

        self.backend.prepare(
            StepRows(
                counts,
                rows,
                bounds,
                slots[of_token],
                at,
                at[of_token] + offsets,
                slots,
                torch.from_numpy(counts).to(self.device),
                self.tables,
                metadata.copied(copy),
            )
        )
        for layer in range(len(self.groups)):
            self.run(layer, moves, rows)
        return tuple(shapes)

    def run(self, layer: int, moves: dict[int, int], rows: np.ndarray) -> None:
        q, k, v = (self.normal(len(rows), heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = torch.full((len(rows), HEADS, D), float("nan"), device=self.device)
        qkv = torch.cat((q, k, v), 1).to(self.device)
        self.backend.run(AttentionLayer(layer, Scores(D**-0.5, sinks=self.sinks)), qkv, QKNormRope(), out)
        for row, sequence in enumerate(moves):
            own = torch.from_numpy(rows == row)
            self.keys[sequence][layer] = torch.cat((self.keys[sequence][layer], k[own]))
            self.values[sequence][layer] = torch.cat((self.values[sequence][layer], v[own]))
            mask = mask_of(self.windows[self.groups[layer]])
            past = self.keys[sequence][layer], self.values[sequence][layer]
            sinks = None if self.sinks is None else self.sinks.cpu()
            expected = attention(q[own], *past, None, None, *mask, sinks)
            torch.testing.assert_close(out.cpu()[own].double(), expected, rtol=1e-5, atol=1e-5)


SceneOf = Callable[..., Scene]


@pytest.fixture(params=list(BACKENDS))
def new_scene(request: pytest.FixtureRequest, device: str) -> SceneOf:
    """A Scene of each backend."""
    return partial(Scene, BACKENDS[request.param], "cpu" if request.param == "cpu" else device)


@pytest.mark.parametrize(
    ("new_scene", "block_size"),
    [
        *(("cpu", size) for size in (8, 16, 32, 128)),
        ("triton", 8),
        ("triton", 32),
        ("triton", 128),
        ("triton, long", 16),
    ],
    indirect=["new_scene"],
)
def test_rows_of_all_lengths(new_scene: SceneOf, block_size: int) -> None:
    scene = new_scene(block_size, 4)
    scene.step({2: 5})
    scene.step({0: 1, 2: 1, 3: 30})
    scene.step({3: 1, 1: 64, 2: 12, 0: 1})
    scene.step({0: 1, 1: 1, 2: 1, 3: 1})
    scene.step({1: 1, 0: 31})


def test_single_tokens_cross_into_new_blocks(new_scene: SceneOf) -> None:
    scene = new_scene(8, 2)
    scene.step({0: 6, 1: 7})
    for _ in range(5):
        scene.step({1: 1, 0: 1})


def test_layers_of_different_groups_use_their_own_tables(new_scene: SceneOf) -> None:
    scene = new_scene(8, 2, groups=(0, 1, 0))
    scene.step({0: 11, 1: 1})
    scene.step({1: 1, 0: 1})


def test_lengths_may_all_be_equal(new_scene: SceneOf) -> None:
    scene = new_scene(16, 3)
    scene.step({0: 9, 1: 9, 2: 9})
    scene.step({0: 1, 1: 1, 2: 1})


@pytest.mark.parametrize(
    ("new_scene", "block_size", "window"),
    [
        *(each for backend in ("cpu", "triton") for each in ((backend, 8, 1), (backend, 8, 16), (backend, 16, 21))),
        ("triton, long", 16, 21),
    ],
    indirect=["new_scene"],
)
def test_windows_see_their_last_tokens_and_no_block_before_them(
    new_scene: SceneOf, block_size: int, window: int
) -> None:
    """Blocks that nobody sees any more become NaN, as if others had written them, and tables go on naming them."""
    scene = new_scene(block_size, 3, groups=(0, 1), windows=(window, None))
    for moves in ({0: 30, 1: 3}, {0: 1, 1: 1}, {2: 40, 0: 23, 1: 1}, {0: 1, 1: 9, 2: 1}, {0: 1}, {0: 1}):
        for sequence in moves:
            left = max(0, scene.length(sequence) - window + 1) // block_size
            scene.kv[:, 0, scene.tables[0][sequence, :left]] = float("nan")
        scene.step(moves)


@pytest.mark.parametrize(
    ("new_scene", "chunk"),
    [("cpu", 8), ("cpu", 20), ("triton", 8), ("triton", 20), ("triton, long", 8)],
    indirect=["new_scene"],
)
def test_chunks_and_sinks_beside_layers_that_see_everything(new_scene: SceneOf, chunk: int) -> None:
    """Blocks of earlier chunks become NaN, as if others had written them, and tables go on naming them."""
    sinks = torch.linspace(-3, 3, HEADS)
    scene = new_scene(8, 3, groups=(0, 1), windows=(Mask(chunk=chunk), None), sinks=sinks)
    for moves in ({0: 30, 1: 3}, {0: 1, 1: 1}, {2: 40, 0: 23, 1: 1}, {0: 1, 1: 9, 2: 1}, {0: 1}, {0: 1}):
        for sequence in moves:
            left = scene.length(sequence) // chunk * chunk // 8
            scene.kv[:, 0, scene.tables[0][sequence, :left]] = float("nan")
        scene.step(moves)


@pytest.mark.parametrize("window", [None, 9])
def test_encoders_see_both_sides_of_whole_rows(new_scene: SceneOf, window: int | None) -> None:
    """Rows of one token are among them, and layers of another group have other windows."""
    for moves in ({0: 30, 1: 1, 2: 64}, {2: 1, 0: 1}, {1: 17}):
        scene = new_scene(8, 3, groups=(0, 1), windows=(Mask(window, two_sided=True), Mask(two_sided=True)))
        scene.step(moves)


def test_rows_of_the_dummy_slot_stand_behind(new_scene: SceneOf) -> None:
    """They all write to the same place; nobody reads what comes out for them."""
    scene = new_scene(8, 3)
    scene.step({1: 20, 0: 1})
    scene.step({0: 1, 1: 1, 2: 1}, dummies=(1,) * 5)
    scene.step({2: 1, 1: 1}, dummies=(1,))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of what pads, and goes nowhere
@pytest.mark.parametrize(
    ("new_scene", "windows", "decode_rows"),
    [
        *(
            (backend, *case)
            for backend in ("cpu", "triton")
            for case in (((None, None), 3), ((9, None), 3), ((None, 9), 0))
        ),
        ("triton, long", (None, None), 3),
    ],
    indirect=["new_scene"],
)
def test_with_limits_metadata_is_equally_long_whatever_the_rows(
    new_scene: SceneOf, windows: tuple[int | None, ...], decode_rows: int
) -> None:
    """Also where all tokens are the step's own, and where one of the dummy's is left. Without room for rows of one
    token they are served in another way."""
    scene, shapes = new_scene(8, 3, groups=(0, 1), windows=windows), set()
    for moves in ({0: 14}, {1: 10, 0: 1}, {0: 1, 2: 8, 1: 6}, {0: 12, 1: 2}, {2: 1, 1: 1, 0: 13}):
        rest = 15 - sum(moves.values())
        dummies = (rest, *[0] * (5 - len(moves) - 1))
        shapes.add(scene.step(moves, dummies, limits=PaddedLimits(15, 5, decode_rows)))
    assert len(shapes) == 1


@pytest.mark.parametrize("limits", [None, PaddedLimits(16, 5, 0), PaddedLimits(16, 5, 3)])
def test_a_few_tokens_behind_long_contexts(
    limits: PaddedLimits | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are so few tiles that they are cut along what they see; where they may be cut is made smaller here."""
    from quire.compute.attention import triton
    from quire.compute.kernels.triton.attention import prefill_split_kv

    shape = TileShape(rows=16, keys=16, warps=4, stages=2)
    for module in (prefill_split_kv, triton):
        monkeypatch.setattr(module, "tile_shape", lambda *_: shape)
    monkeypatch.setattr(triton, "queries_of_tile", lambda d, item, group, device: shape.rows // group)
    monkeypatch.setattr(prefill_split_kv, "MIN_SPLIT_TILES", 1)
    monkeypatch.setattr(prefill_split_kv, "MERGE_TILES", 0)
    monkeypatch.setattr(prefill_split_kv, "max_splits", lambda *_: 6)
    scene = Scene(triton_backend, device, 16, 3, groups=(0, 1), windows=(None, 30))
    scene.step({0: 70, 1: 35})
    prefill = scene.backend.build_metadata(np.array([7]), np.array([70])).prefill
    assert prefill is not None
    assert prefill.splits is not None
    assert prefill.splits.counts.tolist() == [5] * 5
    for moves in ({1: 9, 0: 2}, {0: 1, 1: 5, 2: 3}):
        rest = 16 - sum(moves.values())
        dummies = () if limits is None else (rest, *[0] * (5 - len(moves) - 1))
        scene.step(moves, dummies, limits=limits)


def test_chunks_are_on_a_branch_beside_single_tokens_until_the_layer_ends(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    class Noted:
        def __init__(self, device: torch.device) -> None:
            pass

        @contextmanager
        def fork(self) -> Iterator[None]:
            said.append("fork")
            yield
            said.append("back")

        def join(self) -> None:
            said.append("join")

    monkeypatch.setattr("quire.compute.attention.triton.AuxStream", Noted)
    scene = Scene(triton_backend, device, 16, 3, groups=(0, 0))
    for op in ("qk_norm_rope_and_cache", "decode_attention", "prefill_attention", "prefill_attention_split_kv"):
        own = getattr(scene.backend, f"_{op}")
        word = "prefill" if op in ("prefill_attention", "prefill_attention_split_kv") else op
        monkeypatch.setattr(scene.backend, f"_{op}", lambda *a, own=own, word=word: (said.append(word), own(*a)))
    scene.step({0: 5, 1: 3})
    assert said == ["qk_norm_rope_and_cache", "prefill"] * 2, "nothing is beside them"
    said.clear()
    scene.step({0: 1, 2: 40})
    assert said == ["qk_norm_rope_and_cache", "fork", "prefill", "back", "decode_attention", "join"] * 2


def test_any_steps(new_scene: SceneOf) -> None:
    rng = random.Random(1)
    scene = new_scene(8, 5, groups=(0, 1), windows=(None, 19))
    for _ in range(7):
        sequences = rng.sample(range(5), rng.randint(1, 5))
        moves = {sequence: rng.choice([1, 1, 1, 2, 9, 25]) for sequence in sequences}
        scene.step({s: n for s, n in moves.items() if scene.length(s) + n <= 8 * BLOCKS} or {sequences[0]: 1})


def test_a_gpu_asks_the_host_nothing_about_lengths_of_single_tokens(device: str) -> None:
    scene = Scene(triton_backend, device, 8, 3)
    scene.step({0: 70, 1: 3})
    assert scene.backend.build_metadata(np.ones(2, dtype=np.int64), np.array([70, 3])) == AttentionMetadata()
    scene.step({0: 1, 1: 1}, too_high=1000)
    scene.step({0: 1, 1: 5, 2: 1}, too_high=1000)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("turned", [0, 4, 8])
def test_queries_and_keys_are_normed_then_turned(backend: str, turned: int, device: str) -> None:
    place = "cpu" if backend == "cpu" else device
    kv = torch.zeros(2, 1, 3, 8, KV_HEADS, D, device=place)
    attend = BACKENDS[backend](view_of(kv, (0,), (None,)))
    qkv, norm, angle = torch.randn(9, HEADS + 2 * KV_HEADS, D), torch.randn(HEADS + KV_HEADS, D), torch.randn(9, 4)
    cos, sin = (None, None) if not turned else (f()[:, : turned // 2].contiguous() for f in (angle.cos, angle.sin))
    zero, counts = np.zeros(1, dtype=np.int64), np.array([9])
    metadata = attend.build_metadata(counts, zero).copied(lambda column: column.to(place))
    slots, table = torch.zeros(1, dtype=torch.int64, device=place), torch.tensor([[2, 1]], device=place)
    order, nine = torch.arange(9, device=place), torch.from_numpy(counts).to(place)
    rows = np.zeros(9, int)
    attend.prepare(StepRows(counts, rows, zero, slots.repeat(9), slots, order, slots, nine, (table,), metadata))
    norm_rope = QKNormRope(norm.to(place), 1e-3, *(None if t is None else t.to(place) for t in (cos, sin)))
    out = torch.empty(9, HEADS, D, device=place)
    attend.run(AttentionLayer(0, Scores(0.3, cap=2.0)), qkv.to(place), norm_rope, out)
    qk = qkv[:, : HEADS + KV_HEADS]
    rms_norm(qk, norm, 1e-3, normed := torch.empty(qk.shape))
    if cos is not None and sin is not None:
        rotary(normed, cos, sin, turned_qk := torch.empty(qk.shape))
        normed = turned_qk
    expected = attention(normed[:, :HEADS], normed[:, HEADS:], qkv[:, HEADS + KV_HEADS :], 0.3, 2.0)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(34, 2, 64), (8, 8, 640), (6, 4, 64)])
def test_a_gpu_refuses_shapes_that_it_does_not_serve(heads: int, kv_heads: int, d: int) -> None:
    from quire.compute.attention.triton import TritonAttention
    from quire.errors import ConfigError

    cache = torch.zeros(2, 1, 1, 8, kv_heads, d)
    with pytest.raises(ConfigError, match="not supported on a GPU"):
        TritonAttention(view_of(cache, (0,), (None,)), heads, 4, 16, 16)


@pytest.mark.gpu
def test_a_recorded_step_serves_any_lengths() -> None:
    """A graph of single tokens, recorded at one length, replayed at others: the same as without it."""
    from quire.compute.attention.triton import TritonAttention

    heads, kv_heads, d, rows = 32, 8, 128, 4
    kv = torch.randn(2, 1, 800, 16, kv_heads, d, device="cuda", dtype=torch.bfloat16)
    attend = TritonAttention(view_of(kv, (0,), (None,)), heads, rows, rows, 2880)
    slots = torch.arange(rows, device="cuda")
    table = 1 + torch.randperm(799, device="cuda")[: rows * 180].view(rows, 180)
    starts, positions = torch.zeros(2, rows, dtype=torch.int64, device="cuda")
    qkv = torch.randn(rows, heads + 2 * kv_heads, d, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, heads, d, device="cuda", dtype=torch.bfloat16)
    ones = np.ones(rows, dtype=np.int64)
    single = torch.ones_like(slots)

    def step() -> None:
        attend.prepare(StepRows(ones, np.arange(rows), 0 * ones, slots, starts, positions, slots, single, (table,)))
        attend.run(AttentionLayer(0, Scores(d**-0.5)), qkv, QKNormRope(), out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([0, 1, 2, 3], [2800, 16, 15, 900], [2879] * 4):
        starts.copy_(torch.tensor(lengths))
        positions.copy_(starts)
        qkv.normal_()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)
        assert out.isfinite().all()
