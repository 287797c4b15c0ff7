"""Opens the disk tier, and finds out whether the blocks that it has are those that this worker computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from quire.foundation.config import Config
from quire.foundation.messages.workers import Admitted, DiskContents, Plan
from quire.planning.footprint import format_bytes
from quire.planning.kv_contents import contents_digest
from quire.runtime.worker.disk_store import READERS, DiskStore
from quire.runtime.worker.kv_transfer import BlockTransfer
from quire.runtime.worker.model_runner import ModelRunner
from quire.sampling_params import SamplingParams

TOLERANCE = 0.03
"""Share of the largest magnitude by which an element of the canary may differ: another number of threads rounds in
another way, but another model's keys are far off."""
_MOST_ODD = 0.01  # of the bytes of quantized elements

_log = logging.getLogger(__name__)


def open_disk_store(
    config: Config, runner: ModelRunner, transfer: BlockTransfer, groups: int, scales: Tensor | None
) -> tuple[DiskStore, DiskContents]:
    """Open the store in --kv-disk-path. A canary tells whether its blocks are used: the first block of a fixed text, of
    each KV group, is computed now, and compared with what was computed when the file was begun. No block may hold
    anything yet.

    Raises:
        ConfigError: The directory or the file cannot be used.
    """
    assert config.cache.kv_disk_path is not None
    canary = _computed_canary(runner, transfer, groups, config.cache.block_size)
    block_bytes = sum(part.nbytes for part in canary) // groups
    written = b"".join(_bytes(part) for part in canary)
    digest = contents_digest(config, b"" if scales is None else _bytes(scales.cpu()))
    most = int(config.cache.kv_disk_size * 2**30)
    store = DiskStore(config.cache.kv_disk_path, block_bytes, most, digest, written)
    began = perf_counter()
    stored = store.stored_canary()
    ms = 1e3 * (perf_counter() - began) / groups / READERS  # which read at the same time
    is_same = stored is not None and is_near(canary, stored)
    if stored is not None and not is_same:
        _log.warning(
            "disk tier   blocks in %s are forgotten: this server computes others for the same text",
            config.cache.kv_disk_path,
        )
    entries = store.begin(is_same)
    _log.info(
        "disk tier   %d blocks of %s found, room for %d",
        len(entries), format_bytes(block_bytes), store.num_slots,
    )  # fmt: skip
    return store, DiskContents(store.num_slots, [(slot, *key) for slot, key in entries], ms)


def is_near(canary: Sequence[Tensor], stored: bytes) -> bool:
    """Whether bytes hold what the parts of a canary do, but for rounding."""
    start = 0
    for part in canary:
        other = torch.frombuffer(bytearray(stored[start : start + part.nbytes]), dtype=part.dtype).view(part.shape)
        start += part.nbytes
        if part.dtype.is_floating_point:
            here, there = part.float(), other.float()
            if not (here - there).abs().max() <= TOLERANCE * here.abs().max():
                return False
        elif (part != other).float().mean() > _MOST_ODD:
            return False
    return True


def _computed_canary(runner: ModelRunner, transfer: BlockTransfer, groups: int, block_size: int) -> list[Tensor]:
    """Compute a text of one block in blocks 1 to `groups`, and return what these hold."""
    numbers = list(range(groups))
    plan = Plan(
        step=0,
        admitted=[Admitted(slot=0, length=0, seed=0, num_sampled=0, sampling=SamplingParams(temperature=0.0))],
        block_slots=[0] * groups,
        block_groups=numbers,
        block_indices=[0] * groups,
        block_ids=[1 + number for number in numbers],
        slots=[0],
        counts=[block_size],
        token_rows=[0],
        tokens=list(range(1, 1 + block_size)),
    )
    runner.launch(plan, None).result()
    return [part.contiguous() for number in numbers for part in transfer.device_contents(1 + number)]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
