"""One rank's part of `test_rank_sums.py`, or of a measurement.

    python -m tests.gpu.rank_sums RANK RANKS DIRECTORY WHAT

WHAT is `check`, `time`. Ranks exchange what they offer through files of the directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from quire.foundation.config import environment

if __name__ == "__main__":
    environment.number_gpus_by_pci_bus()
    environment.show_gpu_of_rank_first(int(sys.argv[1]), int(sys.argv[2]))
    environment.prepare_nccl()

import torch
from torch import Tensor

from quire.compute.collectives import cards as cards_module
from quire.compute.collectives.cards import Cards
from quire.compute.collectives.custom_all_reduce import Way, way_of
from quire.compute.kernels.reference.quantized_rows import QuantizedRows
from quire.compute.kernels.triton.norm import rms_norm, rms_norm_quantized
from quire.compute.kernels.triton.ranks.pushed_norm import can_push_rows
from quire.compute.mesh import Mesh

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (2, 6, 510, 514, 4_096, 8_190, 65_538, 131_072, 131_074, 1_000_002, 2_097_152, 9_000_000)
"""Elements: below and above what is pushed, pulled and left to NCCL, of whole and of broken tiles."""
NORMED = ((1, 4_096), (7, 2_880), (33, 1_024), (128, 4_096), (129, 4_096), (300, 5_120), (1_000, 8_192), (9_001, 4_096))
"""Rows and width: pushed and pulled, of whole and of broken tiles and steps."""
MANY_NORMED = ((1, 2_048), (40, 2_048), (129, 8_192), (3, 1_026), (700, 2_048), (64, 4_096))
"""Of norms that follow one another in a graph, with sums of other sizes between them."""
TIMED_ROWS = (1, 8, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
EPS = 1e-5
CALLS = 100_000
PER_GRAPH = 100
MODULO = 64


class FileExchange:
    """An Exchange by files.

    Args:
        directory: All ranks'.
        rank, ranks: This one, and how many there are.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self._ranks = ranks
        self._round = 0

    def __call__(self, data: bytes) -> list[bytes]:
        self._round += 1
        own = self._directory / f"{self._round}.{self._rank}"
        own.with_suffix(f".{self._rank}.part").write_bytes(data)
        own.with_suffix(f".{self._rank}.part").rename(own)
        return [self._read(self._directory / f"{self._round}.{rank}") for rank in range(self._ranks)]

    def _read(self, path: Path) -> bytes:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, path
            time.sleep(0.005)
        return path.read_bytes()


def check(cards: Cards, mesh: Mesh) -> None:
    """Every size and dtype, then many calls in graphs."""
    assert cards._memory is not None, "cards of one host share no memory"
    ways = set()
    for dtype in DTYPES:
        for size in SIZES:
            given = [inputs(rank, size, dtype) for rank in range(mesh.tp)]
            found = given[mesh.tp_rank].clone()
            cards.all_reduce(found)
            way = way_of(size * dtype.itemsize, mesh.tp)
            ways.add(way)
            exact = sum((each.double() for each in given), start=torch.zeros_like(given[0], dtype=torch.float64))
            if way == "nccl":
                torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)
            else:
                ordered = given[0].float().clone()
                for each in given[1:]:
                    ordered += each.float()
                assert torch.equal(found, ordered.to(dtype)), (dtype, size, way)
            by_nccl = given[mesh.tp_rank].clone()
            cards._nccl.all_reduce(by_nccl)
            torch.testing.assert_close(found, by_nccl, rtol=1e-2, atol=1e-2)
        for rows, columns in ((1, 128_256), (3, 1_001), (300, 64_000), (7, 5)):
            check_gathered(cards, mesh, rows, columns, dtype)
    assert ways == {"push", "pull", "nccl"}
    check_norms(cards, mesh)
    for dtype in DTYPES:
        many_calls(cards, mesh, dtype)
    many_norms(cards, mesh)


def check_norms(cards: Cards, mesh: Mesh) -> None:
    """Against the sum in the order of ranks and the card's own norm, and against NCCL's sum."""
    assert cards._memory is not None
    assert cards.norms is not None
    ways = set()
    for dtype in DTYPES:
        for rows, width in NORMED:
            given = [inputs(rank, rows * width, dtype).view(rows, width) for rank in range(mesh.tp)]
            stream, weight = inputs(8, rows * width, dtype).view(rows, width), inputs(9, width, dtype)
            ways.add(cards._memory.norm_way_of(stream, weight))
            total = given[0].float().clone()
            for each in given[1:]:
                total += each.float()
            x, expected_x = stream.clone(), stream.clone()
            out, expected = torch.full_like(x, float("nan")), torch.empty_like(x)
            rms_norm(expected_x, weight, EPS, expected, total.to(dtype))
            cards.norms.rms_norm(x, weight, EPS, out, given[mesh.tp_rank].clone())
            assert torch.equal(x, expected_x), (rows, width, dtype)
            assert_near(out, expected)
            cards._nccl.all_reduce(by_nccl := given[mesh.tp_rank].clone())
            torch.testing.assert_close(x, stream + by_nccl, rtol=1e-2, atol=2e-2)
            if dtype == torch.bfloat16:
                for code in (torch.int8, torch.float8_e4m3fn):
                    x = stream.clone()
                    made = cards.norms.rms_norm_quantized(x, weight, EPS, code, given[mesh.tp_rank].clone())
                    codes = rms_norm_quantized(stream.clone(), weight, EPS, code, total.to(dtype))
                    assert torch.equal(x, expected_x), (rows, width, code)
                    assert_codes_near(made, codes)
    assert {"push", "pull"} <= ways


def assert_near(found: Tensor, expected: Tensor) -> None:
    """The order of a row's squares shows: in bf16 in few places."""
    torch.testing.assert_close(found, expected, rtol=1e-5 if found.dtype == torch.float32 else 2**-6, atol=1e-5)
    if found.dtype == torch.bfloat16:
        different = int((found != expected).sum())
        assert different <= 1 + 0.02 * found.numel(), f"{different} of {found.numel()}"


def assert_codes_near(found: QuantizedRows, expected: QuantizedRows) -> None:
    """A code apart at most, and scales as far apart as neighbours of bf16."""
    scales_apart = 2**-7
    torch.testing.assert_close(found.scales, expected.scales, rtol=scales_apart, atol=0)
    values, others = (rows.codes.float() * rows.scales for rows in (found, expected))
    if found.codes.dtype == torch.int8:
        apart = expected.scales + others.abs() * scales_apart
    else:  # codes of e4m3 are 2⁻⁹ apart near 0, and else up to an eighth
        apart = expected.scales * 2**-9 + others.abs() * ((1 + 2**-3) * (1 + scales_apart) - 1)
    wrong = (values - others).abs() > 1.001 * apart
    assert not bool(wrong.any()), f"{found.codes.dtype}: {values[wrong][:4]}, expected {others[wrong][:4]}"


def many_norms(cards: Cards, mesh: Mesh) -> None:
    """In a graph, with inputs that change with every call, as many_calls; other sums take turns with them."""
    assert cards.norms is not None
    norms = cards.norms
    bases = [
        [inputs(rank, rows * width, torch.float32).mul(8).floor().remainder(32).view(rows, width) for rank in range(2)]
        for rows, width in MANY_NORMED
    ]
    steps = torch.zeros(1, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")

    def one(number: int) -> None:
        base = bases[number % len(bases)]
        steps.add_(1)
        summands = [(base[rank % 2] + (steps * (rank + 1)) % MODULO).bfloat16() for rank in range(mesh.tp)]
        expected_x = sum((each.float() for each in summands[1:]), start=summands[0].float()).bfloat16()
        weight = expected_x[0] * 0 + 1
        x, out, expected = torch.zeros_like(expected_x), torch.empty_like(expected_x), torch.empty_like(expected_x)
        norms.rms_norm(x, weight, EPS, out, summands[mesh.tp_rank].clone())
        rms_norm(expected_x, weight, EPS, expected)
        wrong[0].add_((x != expected_x).sum())
        wrong[1].add_(((out.float() - expected.float()).abs() > 2**-6 * expected.float().abs()).sum())
        if number % 3 == 0:
            cards.all_reduce(summands[mesh.tp_rank])
            wrong[0].add_((summands[mesh.tp_rank] != expected_x).sum())

    graph = graph_of(lambda: [one(number) for number in range(PER_GRAPH)])
    for _ in range(CALLS // PER_GRAPH):
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0], f"streams and norms that are wrong: {wrong.tolist()}"


def check_gathered(cards: Cards, mesh: Mesh, rows: int, columns: int, dtype: torch.dtype) -> None:
    whole = inputs(9, rows * columns, dtype).view(rows, columns)
    part = mesh.padded_part(columns)
    own = torch.full((rows, part.count + 3), float("nan"), dtype=dtype, device="cuda")  # a head may have more columns
    own[:, : part.count] = whole[:, part.start : part.start + part.count]
    for gather in (cards.gather_columns, cards._nccl.gather_columns):
        out = torch.full_like(whole, float("nan"))
        gather(own, out)
        assert torch.equal(out, whole), (rows, columns, dtype, gather)


def many_calls(cards: Cards, mesh: Mesh, dtype: torch.dtype) -> None:
    """Sums in a graph whose inputs change with every call, so that what is left of an earlier one shows."""
    sizes = [2_048, 131_074, 4_096, 8_190, 262_144, 66]
    bases = [
        [inputs(rank, size, torch.float32).mul(8).floor().remainder(32) for rank in range(mesh.tp)] for size in sizes
    ]
    steps = torch.zeros(1, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

    def one(number: int) -> None:
        base = bases[number % len(sizes)]
        steps.add_(1)
        own = (base[mesh.tp_rank] + (steps * (mesh.tp_rank + 1)) % MODULO).to(dtype)
        expected = sum(
            (base[rank] + (steps * (rank + 1)) % MODULO for rank in range(1, mesh.tp)), start=base[0] + steps % MODULO
        )
        cards.all_reduce(own)
        wrong.add_((own.float() != expected).sum())

    graph = graph_of(lambda: [one(number) for number in range(PER_GRAPH)])
    for _ in range(CALLS // PER_GRAPH):
        graph.replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} sums of {dtype} are wrong"


def measure(cards: Cards, mesh: Mesh) -> None:
    """Microseconds of a sum, by size and way."""
    assert cards._memory is not None
    memory, nccl = cards._memory, cards._nccl
    ways: dict[Way, Callable[[Tensor], None]] = {
        "push": lambda x: memory.all_reduce(x, "push"),
        "pull": lambda x: memory.all_reduce(x, "pull"),
        "nccl": nccl.all_reduce,
    }
    for power in range(12, 28):
        size, row = 1 << power, {}
        for way, call in ways.items():
            if (way == "push" and size > 1 << 20) or (way == "pull" and size > 1 << 25):
                continue
            row[way] = microseconds(call, torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda"))
        if mesh.tp_rank == 0:
            print(f"{size:>12,} bytes  " + "  ".join(f"{way} {found:8.1f}" for way, found in row.items()), flush=True)
    for rows in (1, 32, 256):
        x, out = (torch.zeros((rows, n), dtype=torch.bfloat16, device="cuda") for n in (128_256 // mesh.tp, 128_256))
        own = microseconds(lambda x, out=out: cards.gather_columns(x, out), x)
        other = microseconds(lambda x, out=out: nccl.gather_columns(x, out), x)
        if mesh.tp_rank == 0:
            print(f"{rows:>4} rows of 128,256 gathered: own {own:8.1f}  nccl {other:8.1f}", flush=True)

    measure_norms(cards, mesh)


def measure_norms(cards: Cards, mesh: Mesh) -> None:
    """Microseconds of a sum with the norm behind it, by rows, width and way."""
    assert cards._memory is not None
    memory = cards._memory
    for width in (4_096, 8_192):
        weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
        for rows in TIMED_ROWS:
            x, out = (torch.zeros((rows, width), dtype=torch.bfloat16, device="cuda") for _ in range(2))

            def separate(delta: Tensor, x: Tensor = x, out: Tensor = out, weight: Tensor = weight) -> None:
                cards.all_reduce(delta)
                rms_norm(x, weight, EPS, out, delta)

            row = {"separate": microseconds(separate, torch.zeros_like(x))}
            row["norm alone"] = microseconds(
                lambda delta, x=x, out=out, weight=weight: rms_norm(x, weight, EPS, out, delta), torch.zeros_like(x)
            )
            for way in ("push", "pull"):
                if way == "push" and not can_push_rows(x):
                    continue
                row[way] = microseconds(
                    lambda delta, x=x, out=out, weight=weight, way=way: memory.norm(
                        x, weight, EPS, out, None, delta, way
                    ),
                    torch.zeros_like(x),
                )
            if mesh.tp_rank == 0:
                found = "  ".join(f"{way} {time:8.1f}" for way, time in row.items())
                print(f"{rows:>6} × {width:,} and norm  {found}", flush=True)


def microseconds(call: Callable[[Tensor], None], x: Tensor, calls: int = 20, replays: int = 15) -> float:
    """Of one call in a graph of several; the median of replays."""
    graph = graph_of(lambda: [call(x) for _ in range(calls)])
    times = []
    for _ in range(replays):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def inputs(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """A rank's, which all ranks can make."""
    generator = torch.Generator("cuda").manual_seed(1_000 * rank + size)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def main() -> None:
    rank, ranks, directory, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    mesh, device = Mesh(rank, tp=ranks), torch.device("cuda:0")
    cards = cards_module.Cards(mesh, device, FileExchange(directory, rank, ranks))
    with torch.inference_mode():
        (check if what == "check" else measure)(cards, mesh)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
