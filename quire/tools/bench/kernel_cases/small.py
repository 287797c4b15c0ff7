"""Cases of ops around the layers: a step's beginning and end, embeddings, angles, moves of KV blocks. They are bf16 and
have the sizes of Llama-3.1-8B, except for the vocabulary, of which a step reads little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.kernels.reference.sample import SamplingColumns
from quire.tools.bench.kernel_cases import INT, ITEM, Arguments, KernelCase, normal, on

_HIDDEN, _VOCABULARY, _HEAD = 4_096, 32_000, 128
_PIECE = (16, 8, 128)
_STORAGES = 64
_TURNS = 3


def _prepare_inputs(rows: int, tokens_a_row: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        tokens, slots = rows * tokens_a_row, 2 * rows + 1
        return on(
            device,
            torch.randperm(slots - 1)[:rows],
            torch.full((rows,), tokens_a_row),
            torch.arange(rows).repeat_interleave(tokens_a_row),
            torch.arange(tokens_a_row).repeat(rows),
            torch.randint(-1, 2, (tokens,)),
            *torch.randint(0, 1_000, (2, slots)),
            slots - 1,
            *(torch.empty(n, dtype=torch.int64) for n in (rows, tokens, tokens, tokens)),
        )

    moved = 6 * rows * tokens_a_row + 6 * rows  # three columns of tokens in and out; five of rows, and lengths back
    return KernelCase("prepare_inputs", f"{rows} × {tokens_a_row}", make, moved * INT)


def _init_slots(owners: int, blocks: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        slots, ints, floats = 257, 6, 3
        return on(
            device,
            torch.randperm(slots)[:owners],
            torch.randint(0, 1_000, (owners * ints,)),
            torch.rand(owners * floats, dtype=torch.float64),
            torch.zeros(ints, slots, dtype=torch.int64),
            torch.zeros(floats, slots),
            torch.zeros(1, slots, blocks, dtype=torch.int64),
        )

    return KernelCase("init_slots", f"{owners} × {blocks}", make, owners * (blocks + 19) * INT)


def _position_columns(rows: int, drafts: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        slots, positions = rows + 1, rows * (1 + drafts)

        def columns(number: int) -> SamplingColumns:
            ints, floats = torch.randint(0, 1_000, (3, number)).to(device), torch.rand(3, number).to(device)
            return SamplingColumns(floats[0], ints[0], floats[1], floats[2], ints[1], ints[2])

        where = torch.randperm(rows).repeat_interleave(1 + drafts)
        return on(device, where, torch.arange(1 + drafts).repeat(rows), columns(slots), columns(positions))

    return KernelCase("position_columns", f"{rows} × {1 + drafts}", make, rows * (1 + drafts) * 11 * INT)


def _verify_drafts(rows: int, drafts: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        positions = rows * (1 + drafts)
        tokens = torch.randint(0, 1_000, (positions,))
        next_drafts = torch.where(torch.rand(positions) < 0.7, tokens, tokens + 1)
        next_drafts[drafts :: 1 + drafts] = -1
        ends = torch.arange(1 + drafts, positions + 1, 1 + drafts)
        where = torch.randperm(rows).repeat_interleave(1 + drafts)
        given = (tokens, torch.zeros(positions, dtype=torch.int8), next_drafts, ends, where)
        table = (*torch.randint(0, 1_000, (3, rows + 1)), torch.zeros(rows + 1, 1 + drafts).long())
        return on(device, *given, *table, torch.zeros(rows, dtype=torch.int64))

    return KernelCase("verify_drafts", f"{rows} × {1 + drafts}", make, rows * (5 * (1 + drafts) + 8) * INT)


def _look_up_tokens(rows: int, drafts: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        ids = torch.cat((torch.tensor([-1]), -2 - torch.arange(drafts))).repeat(rows)
        where = torch.randperm(rows).repeat_interleave(1 + drafts)
        return on(device, ids, where, torch.randint(0, 1_000, (rows + 1, drafts)), torch.zeros_like(ids))

    return KernelCase("look_up_tokens", f"{rows} × {1 + drafts}", make, rows * (1 + drafts) * 4 * INT)


def _follow_slots(rows: int, tokens: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return on(
            device,
            torch.randperm(rows),
            torch.arange(rows).repeat_interleave(tokens),
            torch.arange(tokens).repeat(rows),
            (-2 - torch.arange(tokens)).repeat(rows),
            *torch.randint(100, 1_000, (2, rows + 1)),
            tokens,
            *torch.zeros(2, rows + 1, dtype=torch.int64),
        )

    return KernelCase("follow_slots", f"{rows} × {tokens}", make, rows * (3 * tokens + 5) * INT)


def _note_drafts(rows: int, drafts: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        out = torch.zeros(rows + 1, drafts, dtype=torch.int64)
        return on(device, torch.randperm(rows), *torch.randint(0, 2, (3, rows + 1)), out)

    return KernelCase("note_drafts", f"{rows} × {drafts}", make, rows * 5 * INT)


def _copy_inputs(entries: int) -> KernelCase:
    """Copies from buffers on the device, which leaves out the cost of the way to the host."""

    def make(device: torch.device) -> Arguments:
        buffers = torch.randint(0, 1_000, (_TURNS, entries))
        return on(device, buffers, torch.zeros(8, dtype=torch.int64), torch.empty_like(buffers[0]))

    return KernelCase("copy_inputs_from_host", f"{entries}", make, 2 * entries * INT)


def _copy_outputs(entries: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        buffers = torch.zeros(_TURNS, entries, dtype=torch.int64)
        return on(device, torch.randint(0, 1_000, (entries,)), buffers, torch.ones(8, dtype=torch.int64))

    return KernelCase("copy_outputs_to_host", f"{entries}", make, 2 * entries * INT)


def _embed(tokens: int, width: int, vocabulary: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        weight = normal(device, vocabulary, width)
        ids = torch.randint(0, vocabulary, (tokens,), device=device)
        return (ids, weight, None, torch.empty(tokens, width, dtype=weight.dtype, device=device)), {}

    return KernelCase("embed", f"{tokens} × {width}", make, 2 * tokens * width * ITEM)


def _angles(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        positions = torch.randint(0, 131_072, (tokens,), device=device)
        frequencies = 1 / 5e5 ** (torch.arange(0, width, 2, device=device) / width)
        out = (torch.empty(tokens, width // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
        return (positions, frequencies, 1.0, *out), {}

    return KernelCase("angles", f"{tokens} × {width}", make, tokens * (width * ITEM + INT))


def _move_blocks(blocks: int, storages: int, piece: Sequence[int], *, staged: bool) -> KernelCase:
    """Moves blocks within the cache, or with `staged` to a buffer."""

    def make(device: torch.device) -> Arguments:
        shape = (storages, 4 * blocks, *piece)
        cache = normal(device, *shape).transpose(0, 1)
        numbers = torch.randperm(4 * blocks, device=device)
        if staged:
            return (cache, numbers[:blocks], torch.empty_like(cache[:blocks].contiguous()), None), {}
        return (cache, numbers[:blocks], cache, numbers[blocks : 2 * blocks]), {}

    size = storages * torch.Size(piece).numel()
    name = f"{blocks} × {size * ITEM // 1024} KB{' to a buffer' if staged else ''}"
    return KernelCase("move_blocks", name, make, 2 * blocks * size * ITEM)


CASES = (
    *(_prepare_inputs(rows, tokens) for rows, tokens in ((1, 1), (256, 1), (8, 1_024))),
    *(_init_slots(owners, 8_192) for owners in (1, 64)),
    *(
        make(rows, 4)
        for make in (_position_columns, _verify_drafts, _look_up_tokens, _follow_slots, _note_drafts)
        for rows in (1, 256)
    ),
    *(_copy_inputs(entries) for entries in (256, 2_048, 65_536)),
    *(_copy_outputs(entries) for entries in (288, 1_152)),
    *(_embed(tokens, _HIDDEN, _VOCABULARY) for tokens in (1, 256, 8_192)),
    *(_angles(tokens, _HEAD) for tokens in (1, 256, 8_192)),
    *(_move_blocks(blocks, _STORAGES, _PIECE, staged=staged) for blocks in (1, 16) for staged in (False, True)),
)
SMALL_CASES = (
    *(_prepare_inputs(3, tokens) for tokens in (1, 2)),
    _init_slots(3, 17),
    _position_columns(3, 2),
    _verify_drafts(3, 2),
    _look_up_tokens(3, 2),
    _follow_slots(3, 2),
    _note_drafts(3, 2),
    _copy_inputs(17),
    _copy_outputs(5),
    _embed(3, 64, 100),
    _angles(3, 16),
    *(_move_blocks(2, 2, (4, 2, 8), staged=staged) for staged in (False, True)),
)
