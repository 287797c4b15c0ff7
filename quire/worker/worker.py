"""One device: loads the model and its KV cache, says how large they are, and executes plans.

Takes a Config that is already resolved: `model` is a directory, and dtype, lengths and the size of the KV cache are
chosen. Knows nothing about requests or the scheduler.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from quire.attention.cpu import CpuAttention
from quire.clock import Clock
from quire.config import Config
from quire.errors import ConfigError, MemoryBudgetError
from quire.layers.factory import LayerFactory
from quire.layers.layer import Place, needs_of, pull_all
from quire.logits_processors import load_processors
from quire.messages import Plan, Result, Sizing
from quire.models.model import Model, build_model
from quire.models.spec import ModelSpec, read_spec
from quire.weights.checkpoint import Checkpoint, Need, check, with_known_names
from quire.weights.dummy import DummyCheckpoint
from quire.weights.progress import ReadingProgress
from quire.weights.safetensors import SafetensorsCheckpoint
from quire.worker.freed_memory import give_back_freed
from quire.worker.kv_tensors import allocate_storage, block_transfer, kv_view, number_of_blocks, number_of_host_blocks
from quire.worker.runner import LargestStep, Runner
from quire.worker.slots import SlotTable
from quire.worker.threads import usable_cores
from quire.worker.transfer import BlockTransfer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float": torch.float32}
_GB = 1e9
_log = logging.getLogger(__name__)


class Worker:
    """Owns the device's tensors. `load` comes once, before any `execute`; both in the same thread."""

    def __init__(self, config: Config, clock: Clock, device: str = "cpu") -> None:
        self._config = config
        self._clock = clock
        self._device = torch.device(device)
        self._runner: Runner

    def load(self) -> Sizing:
        """Read the weights and allocate the KV cache.

        Raises:
            CheckpointError: The model's files do not serve.
            MemoryBudgetError: Weights or KV cache do not fit; the message names the flag to change.
        """
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        config, began = self._config, self._clock.now()
        spec, dtype = read_spec(config.model.model), _dtype(config)
        factory = LayerFactory(Place(self._device, dtype))
        model = build_model(spec, factory)
        self._read_weights(spec, factory)
        give_back_freed()
        read = self._clock.now()
        blocks = number_of_blocks(config.cache, spec, config.model.dtype)
        storage = allocate_storage(spec, blocks, config.cache.block_size, dtype, self._device)
        host_blocks = number_of_host_blocks(config.cache, spec, config.model.dtype)
        self._runner = self._build_runner(
            spec, model, CpuAttention(kv_view(storage, spec)), block_transfer(storage, host_blocks)
        )
        startup = {"weights": read - began, "kv_cache": self._clock.now() - read}
        return Sizing(blocks, spec.vocab_size, host_blocks, startup)

    def execute(self, plan: Plan) -> Result:
        """Run one step."""
        return self._runner.launch(plan).result()

    def _read_weights(self, spec: ModelSpec, factory: LayerFactory) -> None:
        load, name = self._config.load, self._config.model.dtype
        needs = needs_of(factory.layers)
        checkpoint = self._open(needs)
        check(checkpoint, needs, spec.architecture)
        progress = ReadingProgress(spec.weight_bytes(name), self._clock, load.use_tqdm_on_load)
        try:
            pull_all(factory.layers, checkpoint, torch.get_num_threads(), progress)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise MemoryBudgetError(
                f"The weights need {spec.weight_bytes(name) / _GB:.1f} GB as {name}, which this machine cannot give: "
                "use --dtype bfloat16 or a smaller model."
            ) from None
        finally:
            checkpoint.close()
        size = spec.weight_bytes(name) / _GB
        _log.info("weights     %.2f GB in %.1f s, %.2f GB/s", size, progress.seconds, size / (progress.seconds or 1))

    def _open(self, needs: list[Need]) -> Checkpoint:
        if self._config.load.load_format == "dummy":
            return DummyCheckpoint(needs, self._config.model.seed)
        return with_known_names(SafetensorsCheckpoint(Path(self._config.model.model)))

    def _build_runner(self, spec: ModelSpec, model: Model, attention: CpuAttention, transfer: BlockTransfer) -> Runner:
        config = self._config
        length, size = config.model.max_model_len, config.cache.block_size
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        if not isinstance(length, int) or rows is None or tokens is None:
            raise ConfigError("max_model_len, max_num_seqs and max_num_batched_tokens have not been resolved.")
        processors = load_processors(config.model.logits_processors)
        slots = SlotTable(rows, -(-length // size), len(spec.kv_groups()), spec.vocab_size, self._device, processors)
        largest = LargestStep(rows, tokens)
        return Runner(model, attention, transfer, slots, largest, spec.keys is not None, config.model.logprobs_mode)


def _dtype(config: Config) -> torch.dtype:
    if config.model.dtype not in DTYPES:
        raise ConfigError(f"--dtype {config.model.dtype} has not been resolved to one of {', '.join(DTYPES)}.")
    return DTYPES[config.model.dtype]
