"""Whether another model is loaded beside the one that is served, or after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.errors import MemoryBudgetError
from quire.foundation.config import Config
from quire.planning.auto_config import resolve
from quire.planning.footprint import GIB
from quire.planning.machine import Gpu, Machine
from quire.planning.swap_plan import plan_swap

ASKED = Config().with_values(device="cpu", max_model_len=512, max_num_seqs=64, swap_space=0.0)
MACHINE = Machine(8 * GIB, fast_bfloat16=True)


def total(config: Config, machine: Machine = MACHINE) -> int:
    return resolve(config, machine).memory.footprint.total


def test_where_both_fit_the_new_model_is_loaded_beside() -> None:
    served = resolve(ASKED, MACHINE).config
    plan = plan_swap(served, ASKED, "auto", MACHINE)
    assert (plan.mode, plan.reason) == ("beside", "both models fit into memory together")
    assert plan.resolved.memory.num_blocks == resolve(ASKED, MACHINE).memory.num_blocks
    assert plan_swap(served, ASKED, "after", MACHINE).mode == "after"


def test_where_both_do_not_fit_the_old_one_ends_first() -> None:
    served = resolve(ASKED, MACHINE).config
    left = replace(MACHINE, memory_bytes=total(served) - 2**20)  # while it serves, and has written nothing yet
    plan = plan_swap(served, ASKED, "auto", left)
    assert plan.mode == "after"
    assert "do not fit into memory together" in plan.reason
    with pytest.raises(MemoryBudgetError, match="does not fit beside the model that is served; mode 'after'"):
        plan_swap(served, ASKED, "beside", left)


def test_a_cache_that_would_be_cut_to_less_than_half_is_no_reason_to_stay_beside() -> None:
    small = ASKED.with_values(max_num_seqs=1, num_gpu_blocks_override=64)
    served = resolve(ASKED, MACHINE).config
    later = total(served) - resolve(served, MACHINE).memory.footprint.weights
    tight = replace(MACHINE, memory_bytes=later + total(small) + 40 * 2**20)
    plan = plan_swap(served, ASKED, "auto", tight)
    assert plan.mode == "after"
    assert "% of the KV cache" in plan.reason
    beside = plan_swap(served, ASKED, "beside", tight)
    assert beside.mode == "beside"
    assert beside.resolved.memory.num_blocks < plan.resolved.memory.num_blocks / 2


def test_what_the_engines_of_several_processes_may_still_take_counts_for_each() -> None:
    several = ASKED.with_values(data_parallel_size=4)
    served = resolve(several, replace(MACHINE, memory_bytes=64 * GIB), replicas=True).config
    one = resolve(ASKED, MACHINE).config
    left = replace(MACHINE, memory_bytes=int(2.5 * total(one)))
    assert plan_swap(one, ASKED, "auto", left).mode == "beside"
    assert plan_swap(served, ASKED, "auto", left).mode == "after"


def test_on_a_gpu_beside_needs_a_share_that_the_old_model_has_left() -> None:
    gpu = Gpu("H100", (9, 0), 80 * GIB, 80 * GIB)
    empty = Machine(64 * GIB, True, gpu)
    asked = Config().with_values(device="cuda", gpu_memory_utilization=0.4)
    served = resolve(asked, empty).config
    half_full = replace(empty, gpu=replace(gpu, free_bytes=int(0.6 * 80 * GIB)))
    assert plan_swap(served, asked, "auto", half_full).mode == "after"
    larger = asked.with_values(gpu_memory_utilization=0.95)
    assert plan_swap(served, larger, "auto", half_full).mode == "beside"
