"""What compile warm-up finds: all kernels that steps launch later, from a model of a few layers of every kind."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.spec import read_spec
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.startup.compile_warmup import layers_of_every_kind, reduced_model, warmup_steps
from tests.checkpoints import edit_config, make_tiny
from tests.kernels.triton.not_interpreted import printed_by
from tests.parity.cases import CASES

MODELS = (
    "qwen3, wide heads",
    "mistral, window, 4.x",
    "qwen3 moe",
    "gemma3",
    "gpt2",
    "longrope, phi3, 4.x",
    "deepseek v3, latents, mscale",
    "qwen3 moe, 4 bits",
)
QUANTIZED = "qwen3 moe, 4 bits"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    models = {case: CASES[case] for case in MODELS if case in CASES}
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32}
    models[QUANTIZED] = CASES["qwen3 moe"] | sizes
    models[MODELS[0]] = models[MODELS[0]] | {"max_position_embeddings": 2048}  # long rows have kernels of their own
    made = [make_tiny(tmp_path_factory.mktemp("tiny"), **shape) for shape in models.values()]
    edit_config(made[MODELS.index(QUANTIZED)], {"quantization_config": GPTQ})  # its weights are dummies
    return made


@pytest.fixture(scope="module")
def served(directories: list[Path]) -> list[dict[str, Any]]:
    """Of another process, since in this one kernels are interpreted."""
    lines = printed_by("tests.worker.fake_gpu", *map(str, directories)).splitlines()
    return [json.loads(line) for line in lines]


def test_no_step_launches_a_kernel_that_warm_up_missed(served: list[dict[str, Any]]) -> None:
    assert len(served) == 2 * len(MODELS)
    for one in served:
        assert len(one["found"]) > 20
        assert one["missed"] == [], one
        assert one["found"].count("_gated_gemm_kernel") <= 1  # for all numbers of rows


def test_no_step_with_adapters_launches_a_kernel_that_warm_up_missed(directories: list[Path], tmp_path: Path) -> None:
    """Of adapters, experts and their codes: in steps without adapters, with some that leave experts alone, and with
    some that do not. All other kernels are those of the test before. One model has so many layers that 16 divides how
    far adapters' ranks lie apart, as it does not in a model of a few.
    """
    deep = make_tiny(tmp_path, **CASES["qwen3 moe"] | {"num_hidden_layers": 11})
    few = [str(deep), str(directories[MODELS.index(QUANTIZED)])]
    served = [json.loads(line) for line in printed_by("tests.worker.fake_gpu", "--lora", "32", *few).splitlines()]
    assert len(served) == 4
    of_adapters = {"_shrink", "_expand", "_shrink_pairs", "_expand_pairs", "_group_kernel"}
    with_updates = {"_tile_and_shrink_kernel", "_qk_norm_rope_and_cache", "_lora_rms_norm", "_expand_silu_and_mul"}
    of_experts = {"_pair_kernel", "_token_kernel", "_tile_kernel", "_sum_kernel", "_route_kernel"}
    for one in served:
        assert not (of_adapters | with_updates | of_experts) & {*one["missed"]}, one
        assert of_adapters <= {*one["found"]}
    assert with_updates <= {*served[0]["found"]}  # its weights are dense


def test_no_step_of_a_stage_launches_a_kernel_that_its_warm_up_missed(directories: list[Path]) -> None:
    """Of stages whose layers are all alike too, and with streams and tokens between them."""
    few = [str(directories[MODELS.index(case)]) for case in ("qwen3 moe", "gemma3")]
    stages = [json.loads(line) for line in printed_by("tests.worker.fake_gpu", "--stages", "2", *few).splitlines()]
    assert [one["stage"] for one in stages] == [0, 1, 0, 1]
    for one in stages:
        assert one["missed"] == [], one
        assert {"_take_tokens", "_send_stream"} <= {*one["found"]} or one["stage"]
        assert {"_receive_stream", "_send_tokens"} <= {*one["found"]} or not one["stage"]


def test_long_attention_experts_codes_and_gated_products_are_found(served: list[dict[str, Any]]) -> None:
    found = {kernel for one in served for kernel in one["found"]}
    assert {
        "_prefill_attention_dense",
        "_gather_kv",
        "_gated_gemm_kernel",
        "_route_kernel",
        "_coded_kernel",
        "_tile_kernel",
        "_expand_grouped",
        "_apply_penalties",
    } <= found


def test_tiles_are_found_whole_and_in_parts(served: list[dict[str, Any]]) -> None:
    tiles = {"_prefill_attention", "_prefill_attention_split_kv", "_merge_splits"}
    of_latents = {"_prefill_latents", "_decode_latents"}
    for one in served:
        found = {*one["found"]}
        assert tiles <= found or (of_latents <= found and not tiles & found)
    assert sum(of_latents <= {*one["found"]} for one in served) == 2


def test_copies_from_the_host_and_back_are_found_once(served: list[dict[str, Any]]) -> None:
    """Whatever the numbers of rows and tokens."""
    for one in served:
        assert one["found"].count("_copy_inputs_from_host") == one["found"].count("_copy_outputs_to_host") == 1


def test_steps_have_all_numbers_of_rows_and_tokens() -> None:
    steps = list(warmup_steps(StepLimits(rows=300, tokens=1000, length=400)))
    assert {len(counts) for counts in steps if counts[-1] == 1} >= {1, 2, 4, 8, 16, 32, 64, 128, 256, 300}
    assert {sum(counts) for counts in steps if len(counts) < 4} >= {2, 4, 8, 16, 32, 64, 128, 256, 512, 1000}
    assert {len(counts) - 1 for counts in steps if 1 in counts and 2 in counts} >= {1, 256, 299}
    assert all(len(counts) <= 300 and sum(counts) <= 1000 and max(counts) <= 400 for counts in steps)


@pytest.mark.parametrize("largest", [StepLimits(1, 1, 9), StepLimits(1, 7, 9), StepLimits(2, 2, 9)])
def test_steps_of_the_smallest_engines(largest: StepLimits) -> None:
    steps = list(warmup_steps(largest))
    assert [1] in steps
    assert all(len(counts) <= largest.rows and sum(counts) <= largest.tokens for counts in steps)


def test_a_reduced_model_has_every_kind_of_layer(directories: list[Path]) -> None:
    layers = dict(zip(MODELS, map(layers_of_every_kind, map(read_spec, directories)), strict=True))
    assert layers["gemma3"] == 3  # local, local, full
    assert layers["qwen3 moe"] == 4  # experts in the last alone
    assert layers["gpt2"] == 2


def test_a_reduced_model_is_freed_with_its_last_reference(directories: list[Path]) -> None:
    """Without garbage collection, which is off while the engine starts: weights need its memory."""
    gc.disable()
    try:
        for directory in directories:
            model = reduced_model(read_spec(directory), TensorOptions(torch.device("cpu"), torch.float32))
            left = weakref.ref(model)
            del model
            assert left() is None, directory
    finally:
        gc.enable()
