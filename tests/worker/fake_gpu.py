"""Serves models as if there were a GPU, without running a kernel: does compile warm-up find all kernels of steps?

    python -m tests.worker.fake_gpu [--stages N] [--lora RANK] DIRECTORY…

Says for each model and dtype, or for each stage of a pipeline, how many kernels the warm-up found, and which other ones
random steps launched; with adapters of up to a rank, some of which change experts.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from msgspec.structs import replace
from triton.backends.compiler import GPUTarget

from quire.compute.attention import triton as attention
from quire.compute.attention import triton_latents
from quire.compute.collectives import card_stage_links
from quire.compute.kernels import dispatch
from quire.compute.kernels.triton.attention import prefill_dense, prefill_split_kv
from quire.compute.kernels.triton.launching import dependent_launch, precompiler
from quire.compute.kernels.triton.launching.launch import Kernel
from quire.compute.mesh import Mesh
from quire.foundation.messages.workers import PromptLogprobsRow, TokenBitmasks
from quire.models.layers.factory import LayerFactory
from quire.models.lora.updates import AdapterMemory
from quire.models.model import build_model
from quire.models.weights.tensor_options import TensorOptions
from quire.runtime.executor.gpu_rank import for_earlier_stage
from tests.adapters_as_on_a_gpu import serve_as_a_gpu
from tests.kernels.triton.compile_cases import NoCard
from tests.worker.replay_by_running import ReplayByRunning

STEPS, SEED = 60, 0
ADAPTERS = 2
LONGEST, ROWS, TOKENS, CAPTURED = 1_400, 20, 1_500, 512
GPU = GPUTarget("cuda", 90, 32)


def fake_gpu() -> None:
    """Let this process take its CPU for a GPU of sm_90."""
    triton.runtime.driver.set_active(NoCard())
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)  # type: ignore
    prefill_dense.serves_dense_prefill = lambda device, dtype, d: dtype == torch.bfloat16 and d in (64, 128, 256)
    for name, module in list(sys.modules.items()):
        if name.startswith("quire.compute.kernels.triton") and hasattr(module, "can_overlap"):
            module.can_overlap = lambda device: True  # type: ignore[attr-defined]
    dependent_launch.can_overlap = lambda device: True  # type: ignore[assignment]
    prefill_split_kv.multiprocessors = lambda device: 132  # type: ignore[assignment]
    from quire.compute.kernels.triton.experts import expert_adapters
    from quire.compute.kernels.triton.linear import linear
    from quire.models.quantization import coded_experts
    from quire.runtime.worker import buffer_ring

    coded_experts.ExpertLoop = coded_experts.StackedExperts  # type: ignore[misc, assignment]
    buffer_ring._has_memory = lambda device: True  # type: ignore[assignment]

    linear.is_sm_90 = lambda device: True  # type: ignore[assignment]
    linear.LARGE_WEIGHT = (16, 16)
    expert_adapters._LEAST_COLUMNS = 8  # so that programs share even these
    dispatch.KERNELS.update(
        {(op, "cpu"): where for (op, device), where in dispatch.KERNELS.items() if device == "cuda"}
    )


class FakeGpu:
    """A runner of a model on the fake GPU, and the kernels that were missed so far."""

    def __init__(
        self,
        directory: Path,
        dtype: str,
        mode: str,
        compile: precompiler.Compile | None = None,
        mesh: Mesh | None = None,
        rank: int = 0,
    ) -> None:
        from quire.foundation.clock import SystemClock
        from quire.models.rank_spec import rank_share
        from quire.models.spec import read_spec
        from quire.runtime.executor.card_ranks import reach_ranks
        from quire.runtime.worker import worker, worker_parts
        from tests.worker.driver import config_for

        self.functions: list[Any] = []

        def remember(function: Any, specialization: str) -> Any:
            self.functions.append(function)
            return compile(function, specialization) if compile else None

        self.precompiler = precompiler.Precompiler(1, remember, lambda: None)
        self.whole, self.mesh = read_spec(directory), mesh or Mesh()
        self.spec = rank_share(self.whole, self.mesh)
        self.config = config_for(
            directory,
            dtype=dtype,
            load_format="dummy",
            max_num_seqs=ROWS,
            max_num_batched_tokens=TOKENS,
            max_model_len=min(LONGEST, self.whole.max_model_len),
            logprobs_mode=mode,
            **({"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": rank} if rank else {}),
        )
        worker_parts.attention_backend = lambda kv, heads, *more: attention.TritonAttention(kv, heads[0], *more)
        worker_parts.latent_attention_backend = triton_latents.TritonLatentAttention
        every = [b"\1" * 64] * self.mesh.size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                card_stage_links, "OwnMemory", lambda size: SimpleNamespace(address=1 << 20, handle=bytes(64))
            )
            patch.setattr(card_stage_links, "MappedMemory", lambda handle: SimpleNamespace(address=1 << 30))
            ranks = reach_ranks(self.config, self.mesh, torch.device("cpu"), lambda data: every)
        self.links = ranks.links
        self.worker = worker.Worker(
            self.config, SystemClock(), self.precompiler, self.mesh, links=ranks.links, stages=ranks.stages
        )

    def warm_up(self) -> list[str]:
        """What was found."""
        self.worker._warm_up_compilation(self.whole)
        return list(self.precompiler.names)

    def serve(self, seed: int) -> list[str]:
        """The kernels that warm-up missed: of the largest step, of graph capture, and of random steps that are replayed
        or not. They are launched as usual, by Triton, but nothing runs.
        """
        from quire.foundation.clock import SystemClock
        from quire.runtime.worker.kv_tensors import allocate_kv_cache
        from quire.runtime.worker.weight_loading import load_weights
        from quire.runtime.worker.worker_parts import LoadedModel

        found, worker = len(self.precompiler.names), self.worker
        storage = allocate_kv_cache(self.spec, 100, 16, worker_dtype(self.config.model.dtype), torch.device("cpu"))
        slots = worker._parts.slot_table(self.spec)
        options = TensorOptions(torch.device("cpu"), worker_dtype(self.config.model.dtype))
        updates = worker._parts.updates()
        factory = LayerFactory(options, self.whole.quantization, self.mesh, updates=updates)
        model = build_model(self.whole, factory, *self.links)
        load_weights(self.config, self.spec, self.whole, factory, SystemClock())
        if updates is not None:
            AdapterMemory(updates, options.dtype, options.device)
            updates.changes_experts[1] = updates.has_experts
        loaded = LoadedModel(self.spec, model, slots, kernels_known=True, gemm_warmup=None, updates=updates)
        runner = worker._build_runner(loaded, storage)
        graphs = ReplayByRunning.put_into(runner)
        launches = Kernel.__getitem__
        with self.precompiler.warmup():
            Kernel.__getitem__ = launches  # type: ignore[method-assign]
            runner.run_largest(worker._deferred)
            runner.capture_graphs(CAPTURED)
            random_steps(
                runner,
                self.spec.vocab_size,
                self.config.model.max_model_len,
                random.Random(seed),
                self.mesh.is_last,
                0 if updates is None else ADAPTERS,
            )
        assert any(not shape.is_decode for shape in graphs.replayed)
        return self.precompiler.names[found:]

    def forget(self) -> None:
        """Nothing is compiled, for the next model."""
        with self.precompiler:
            pass
        for function in self.functions:
            function.device_caches.clear()


def worker_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def random_steps(
    runner: Any, vocab: int, longest: int, choose: random.Random, is_last: bool = True, adapters: int = 0
) -> None:
    """Sequences come and go, prompts are prefilled in chunks, and each asks for something else. `is_last`: whether this
    is the last stage; `adapters`: how many there are."""
    from tests.worker.driver import Driver, Sequence

    driver = Driver.__new__(Driver)
    driver.block_size, driver.groups, driver.step, driver.owned, driver._new = 16, 1, 0, {}, []
    driver.free = list(range(1, 100)) * 10
    running: dict[int, Sequence] = {}
    for _ in range(STEPS):
        for slot in range(choose.choice((1, 2, ROWS))):
            if slot not in running:
                prompt = [choose.randrange(vocab) for _ in range(choose.choice((1, 2, 7, 40, longest - 20)))]
                running[slot] = driver.admit(slot, prompt, **wishes(choose, vocab))
        moves, room = [], TOKENS
        for sequence in choose.sample(list(running.values()), choose.randint(1, len(running))):
            left = len(sequence.prompt) - sequence.length
            count = min(room, choose.choice((left, choose.randint(1, left)))) if left > 0 else min(room, 1)
            if count:
                moves.append((sequence, count))
            room -= count
        if choose.random() < 0.3:  # a step of single tokens only
            moves = [(sequence, 1) for sequence, _ in moves]
        plan, _ = driver.plan(moves)
        masked = [row for row in plan.sampled_rows if choose.random() < 0.3]
        plan = replace(plan, prompt_logprobs_rows=scored(plan, choose), masked=masked)
        if not is_last:
            plan, masked = for_earlier_stage(plan), []
        if adapters:
            slots = [choose.choice((0, 0, *range(1, adapters + 1))) for _ in plan.admitted]
            owners = [replace(owner, adapter_slot=slot) for owner, slot in zip(plan.admitted, slots, strict=True)]
            plan = replace(plan, admitted=owners)
        step = runner.launch(plan)
        if masked:
            runner.submit_bitmasks(TokenBitmasks(plan.step, masked, [bytes(4 * -(-vocab // 32))] * len(masked)))
        step.result()
        running = {s: one for s, one in running.items() if one.length < min(longest, len(one.prompt) + 15)}


def wishes(choose: random.Random, vocab: int) -> dict[str, Any]:
    """A sequence's sampling parameters."""
    asked: dict[str, Any] = choose.choice(
        (
            {},
            {"temperature": 0.7},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
        )
    )
    transforms: dict[str, Any] = choose.choice(
        (
            {},
            {"presence_penalty": 0.5},
            {"repetition_penalty": 1.1, "logit_bias": {1: 2.0}},
            {"min_tokens": 3, "stop_ids": [2]},
            {"bad_words": [[3], [4, 5]], "allowed_token_ids": [1, 2, 3, 4, 5]},
        )
    )
    reports = choose.choice(({}, {"logprobs": 0}, {"logprobs": 3}, {"prompt_logprobs": 1}, {"logprobs": vocab}))
    return {**asked, **transforms, **reports}


def scored(plan: Any, choose: random.Random) -> list[PromptLogprobsRow]:
    """Rows of prompts whose log probabilities are wanted."""
    return [
        PromptLogprobsRow(row, 0, choose.randint(1, plan.counts[row]), 1)
        for row in plan.token_rows
        if choose.random() < 0.2
    ]


def main(directories: list[str]) -> None:
    """One line of JSON a model and dtype or stage: its directory, dtype, stage, what was found and what was missed."""
    fake_gpu()
    torch.set_num_threads(1)
    stages, rank = 1, 0
    if directories[0] == "--stages":
        stages, directories = int(directories[1]), directories[2:]
    if directories[0] == "--lora":
        rank, directories = int(directories[1]), directories[2:]
        serve_as_a_gpu(pytest.MonkeyPatch())
    for directory in directories:
        kinds = [("bfloat16", "raw_logprobs", Mesh(rank, pp=stages)) for rank in range(stages)]
        if stages == 1:
            kinds.append(("float32", "processed_logits", Mesh()))
        for dtype, mode, mesh in kinds:
            gpu = FakeGpu(Path(directory), dtype, mode, mesh=mesh, rank=rank)
            found = gpu.warm_up()
            missed = gpu.serve(SEED)
            gpu.forget()
            said = {"model": directory, "dtype": dtype, "stage": mesh.stage, "found": found, "missed": missed}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of the precompiler would wait for ever
