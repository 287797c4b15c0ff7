"""Which config of each product is fastest amid a layer, where kernels begin while others end.

    python tuning/h200/tune_layers.py [--model llama-3.1-8b …] [--rows 8 16 32 64 128] [--out DIR]

`tune_linear.py` times a product that follows itself. A layer has a norm, a rotation or attention before each product
and behind it: these fill what a product leaves of the GPU at its end, and a product of few programs leaves more; with
more steps under way it reads on while they end. So here a layer's kernels run as in a decode step, layer after layer in
a graph, each with weights and a cache of its own, and one product after the other takes the config with which the whole
is fastest. Prints microseconds of a layer by config, and puts the fastest into this GPU's table of bf16, which
`tune_linear.py` has written, or into a copy of it in DIR.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from sweep import compile_all, graph_seconds
from torch import Tensor
from tune_linear import Weight, candidates, compile_one, compiled, least, source

from quire.compute.kernels.reference.attention_inputs import CacheWrite, Mask, PagedKV, PagedRows, QKNormRope, Scores
from quire.compute.kernels.reference.paged_attention import KV_SPLIT_COLUMNS, new_decode_partials
from quire.compute.kernels.triton.attention import decode_split_kv, qk_norm_rope
from quire.compute.kernels.triton.linear import linear as products
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.linear import KERNELS, LinearConfig, dense_configs
from quire.compute.kernels.triton.linear.tuned_configs import CONFIGS, TunedConfigs, configs_path, write_configs
from quire.compute.kernels.triton.norm import rms_norm

SHOWN = 4
_CONTEXT = 200
_BLOCK = 16
_WEIGHT_BYTES = 3_500_000_000
"""Of all layers' weights, about: several times the GPU's cache, and as many layers as a graph should have."""


@dataclass(frozen=True)
class Sizes:
    """A model's layer.

    Attributes:
        hidden: Width of the stream.
        heads, kv_heads, width: Of attention.
        inner: Outputs of its gated projection, half of that projection's rows; None: it has experts, which are left
            out.
    """

    hidden: int
    heads: int
    kv_heads: int
    width: int
    inner: int | None

    def weights(self) -> dict[str, Weight]:
        """By the product's name, in their order."""
        weights = {
            "qkv": Weight((self.heads + 2 * self.kv_heads) * self.width, self.hidden),
            "o": Weight(self.hidden, self.heads * self.width),
        }
        if self.inner is not None:
            weights["gate_up"] = Weight(2 * self.inner, self.hidden, gate=True)
            weights["down"] = Weight(self.hidden, self.inner)
        return weights


MODELS = {
    "llama-3.1-8b": Sizes(4_096, 32, 8, 128, 14_336),
    "qwen3-0.6b": Sizes(1_024, 16, 8, 128, 3_072),
    "qwen3-30b-a3b": Sizes(2_048, 32, 4, 128, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--out", type=Path, default=CONFIGS, help="the directory that the table goes to")
    options = parser.parse_args()
    began = time.perf_counter()
    broken = {
        config for config, _ in compile_all(compile_one, to_compile(options.model, options.rows), options.processes)
    }
    chosen: dict[tuple[Weight, int], LinearConfig] = {}
    for model in options.model:
        for rows in options.rows:
            with torch.inference_mode():
                best = tune(model, Layers(MODELS[model], rows), broken)
            chosen |= {(weight, rows): config for weight, config in best.items()}
    path = configs_path(options.out, torch.cuda.get_device_name(), "bf16")
    write_configs(path, with_chosen(dense_configs(), chosen), KERNELS)
    print(f"{time.perf_counter() - began:.0f} s")


def to_compile(models: list[str], rows: list[int]) -> list[tuple[LinearConfig, Weight]]:
    """One job a kernel."""
    jobs: dict[object, tuple[LinearConfig, Weight]] = {}
    for weight in (weight for model in models for weight in MODELS[model].weights().values()):
        for config in (config for count in rows for config in candidates(weight, count)):
            small = Weight(256, weight.columns, weight.gate)
            jobs.setdefault(compiled(config, small), (least(config), small))
    return list(jobs.values())


class Layers:
    """A decode step's layers, without what comes before the first and behind the last."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        self.rows, self.weights = rows, sizes.weights()
        self._sizes = sizes
        one = 2 * sum(weight.outputs * weight.columns for weight in self.weights.values())
        self._number = max(4, min(32, _WEIGHT_BYTES // one))
        self._guess = one / 3e12 + 2e-5
        self._generator = torch.Generator("cuda").manual_seed(0)
        self._w = {
            name: [self._normal(w.outputs, w.columns).div_(w.columns**0.5) for _ in range(self._number)]
            for name, w in self.weights.items()
        }
        self._norm = self._normal(sizes.hidden)
        self._stream = self._normal(rows, sizes.hidden)
        self._normed, self._added = torch.empty_like(self._stream), torch.zeros_like(self._stream)
        self._q, self._attended = (self._normal(rows, sizes.heads, sizes.width) for _ in range(2))
        self._inner = self._normal(rows, sizes.inner or 0)
        self._angles = torch.ones(rows, sizes.width // 2, device="cuda")
        each = -(-_CONTEXT // _BLOCK)
        self._table = torch.randperm(rows * each, device="cuda").view(rows, each)
        self._places = self._table[:, -1] * _BLOCK + (_CONTEXT - 1) % _BLOCK
        shape = (self._number, 2, rows * each, _BLOCK, sizes.kv_heads, sizes.width)
        self._caches = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self._splits, room = self._cut()
        self._partials = new_decode_partials(room, sizes.heads, sizes.kv_heads, sizes.width, self._stream.device)

    def microseconds(self, configs: Mapping[Weight, LinearConfig]) -> float:
        """A layer's, where products of these weights have this config, and others the table's."""
        with _cut_as(configs):
            self._run(0)
            torch.cuda.synchronize()
            calls = [lambda layer=layer: self._run(layer) for layer in range(self._number)]
            return 1e6 * min(graph_seconds(calls, self._guess) for _ in range(2))

    def _run(self, layer: int) -> None:
        sizes, kv = self._sizes, PagedKV(*self._caches[layer])
        rms_norm(self._stream, self._norm, 1e-5, self._normed, self._added)
        qkv = products.linear(self._normed, self._w["qkv"][layer], None).view(self.rows, -1, sizes.width)
        norm_rope = QKNormRope(cos=self._angles, sin=self._angles)
        qk_norm_rope.qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(kv, self._places), self._q)
        out = (Scores(sizes.width**-0.5), self._attended)
        decode_split_kv.decode_attention(self._q, kv, self._table, self._splits, self._partials, *out)
        added = products.linear(self._attended.view(self.rows, -1), self._w["o"][layer], None)
        rms_norm(self._stream, self._norm, 1e-5, self._normed, added)
        if sizes.inner is not None:
            products.linear_silu_and_mul(self._normed, self._w["gate_up"][layer], None, self._inner)
            products.linear(self._inner, self._w["down"][layer], None)

    def _cut(self) -> tuple[Tensor, int]:
        sizes, device = self._sizes, self._table.device
        at_once = decode_split_kv.kv_splits_at_once(sizes.kv_heads, device)
        room = decode_split_kv.kv_splits_for(self.rows, at_once)
        splits = torch.zeros((room, KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
        starts = torch.full((self.rows,), _CONTEXT - 1, device=device)
        tile = decode_split_kv.keys_of_tile(sizes.width, 2)
        slots = torch.arange(self.rows, device=device)
        rows = PagedRows(self._table, slots, starts, torch.ones_like(slots))
        decode_split_kv.plan_kv_splits(rows, None, Mask(), splits, tile, at_once, decode_split_kv.MIN_SPLIT_TILES)
        return splits, room

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.bfloat16, device="cuda")


def tune(model: str, layers: Layers, broken: set[LinearConfig]) -> dict[Weight, LinearConfig]:
    """Print the best configs, one product after the other, and return them."""
    chosen: dict[Weight, LinearConfig] = {}
    print(f"\n{model}, {layers.rows} rows: {layers.microseconds({}):.2f} µs a layer by the table", flush=True)
    for name, weight in layers.weights.items():
        configs = {None, *(config for config in candidates(weight, layers.rows) if least(config) not in broken)}
        took = {config: layers.microseconds(chosen | {weight: config}) for config in configs}
        best = sorted(took, key=took.__getitem__)
        chosen[weight] = best[0]
        shown = "  ".join(f"{source(config)} {took[config]:.2f}" for config in best[:SHOWN])
        print(f"  {name:8} ({weight.outputs}, {weight.columns}): {shown}  cuBLAS {took[None]:.2f}", flush=True)
    print(f"  all of them {layers.microseconds(chosen):.2f}", flush=True)
    return chosen


def with_chosen(
    table: TunedConfigs[GemvConfig | GemmConfig], chosen: Mapping[tuple[Weight, int], LinearConfig]
) -> TunedConfigs[GemvConfig | GemmConfig]:
    """The table with these configs in the places that it has for them."""

    def replaced(gate: bool) -> dict[tuple[int, int], tuple[LinearConfig, ...]]:
        rows_of = table.gated if gate else table.plain
        return {
            shape: tuple(chosen.get((Weight(*shape, gate), n), c) for n, c in zip(table.up_to, configs, strict=True))
            for shape, configs in rows_of.items()
        }

    return TunedConfigs(table.up_to, replaced(False), replaced(True))


@contextmanager
def _cut_as(configs: Mapping[Weight, LinearConfig]) -> Iterator[None]:
    """Products of these weights do not have the table's configs."""
    usual = products.tuned_config

    def choice(outputs: int, columns: int, rows: int, gate: bool) -> LinearConfig:
        weight = Weight(outputs, columns, gate)
        return configs[weight] if weight in configs else usual(outputs, columns, rows, gate)

    products.tuned_config = choice  # type: ignore[assignment]
    try:
        yield
    finally:
        products.tuned_config = usual


if __name__ == "__main__":
    main()
