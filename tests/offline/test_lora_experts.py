"""LoRA of mixtures of experts beside PEFT: routers and experts, as PEFT stores them today and as it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LoRARequest, SamplingParams
from quire.errors import RequestError
from tests.checkpoints import make_tiny
from tests.offline.test_lora import Stage, random_prompts

COUNT, CHOSEN = 4, 2
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {
        "moe_intermediate_size": 32, "num_experts": COUNT, "num_experts_per_tok": CHOSEN, "head_dim": 16,
    },
    "MixtralForCausalLM": {"num_local_experts": COUNT},
}  # fmt: skip
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"rank": 8, "modules": ("q_proj",), "target_parameters": BOTH, "use_rslora": True},
    "others": {
        "rank": 4, "modules": ("o_proj",), "target_parameters": BOTH,
        "rank_pattern": {"mlp.experts.gate_up_proj": 6}, "alpha_pattern": {"experts.down_proj": 3},
    },
}  # fmt: skip
"""PEFT insists that all adapters of a model have the same `target_parameters`."""
OTHERS: dict[str, dict[str, Any]] = {
    "router": {"rank": 8, "modules": ("gate", "v_proj")},
    "attention": {"rank": 4, "modules": ("q_proj", "k_proj"), "use_dora": True},
}


@pytest.fixture(scope="module", params=list(SHAPES))
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Stage]]:
    """Two references, and an engine that serves the adapters of both."""
    directory = tmp_path_factory.mktemp("experts")
    model = make_tiny(directory / "model", request.param, **SHAPES[request.param])
    stages = Stage(directory / "a", model, EXPERTS, max_loras=4), Stage(directory / "b", model, OTHERS)
    yield stages
    for stage in stages:
        stage.llm.close()


def generate(stages: tuple[Stage, Stage], prompts: list[list[int]], names: list[str | None], **how: Any) -> list[Any]:
    """By one engine, adapters of both."""
    stage = Stage.__new__(Stage)
    stage.llm, stage.paths = stages[0].llm, stages[0].paths | stages[1].paths
    return stage.generate(prompts, names, **how)


def reference(stages: tuple[Stage, Stage], name: str | None) -> Any:
    return stages[name in OTHERS].reference


def test_routers_and_experts_are_changed_as_by_peft(stages: tuple[Stage, Stage]) -> None:
    """Beside rows of other adapters and of none, in chunks, from cached prefixes, and in steps that are recorded."""
    names: list[str | None] = ["experts", None, "router", "others", "attention", "experts"]
    prompts = random_prompts(3, [9, 21, 40, 12, 33, 18])
    for prompt, name, output in zip(
        prompts, names, generate(stages, prompts, names, max_tokens=1, prompt_logprobs=2), strict=True
    ):
        expected = reference(stages, name).logits(prompt, name).log_softmax(-1)
        for at, reported in enumerate(output.prompt_logprobs[1:], 1):
            for token, found in reported.items():
                assert abs(found.logprob - float(expected[at - 1, token])) < 1e-4, (name, at)
    cached = generate(stages, prompts, names, max_tokens=24)
    for prompt, name, output in zip(prompts, names, cached, strict=True):
        assert list(output.outputs[0].token_ids) == reference(stages, name).greedy(prompt, name, 24), name
    alone = generate(stages, prompts[:1], [None], max_tokens=24)[0]
    assert list(alone.outputs[0].token_ids) == reference(stages, None).greedy(prompts[0], None, 24)


def test_one_tensor_for_each_expert_means_the_same(stages: tuple[Stage, Stage], tmp_path: Path) -> None:
    """As PEFT wrote them while experts were modules of their own, and as vLLM takes them."""
    own = stages[0].paths["experts"]
    directory = tmp_path / "separate"
    directory.mkdir()
    is_mixtral = "Mixtral" in (Path(stages[0].llm._config.model.model) / "config.json").read_text()
    parent, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2") if is_mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    tensors = {}
    for name, tensor in load_file(own / "adapter_model.safetensors").items():
        stem, found, rest = name.partition(".mlp.experts.")
        if not found:
            tensors[name] = tensor
            continue
        is_a, wraps = ".lora_A." in f".{rest}", not rest.startswith("base_layer.")
        for number in range(COUNT):
            if is_a:
                part = tensor.reshape(COUNT, -1, tensor.shape[1])[number]
                cut = {down: part} if wraps else {gate: part, up: part}
            else:
                part = tensor.reshape(tensor.shape[0], -1, COUNT)[:, :, number]
                half = len(part) // 2
                cut = {down: part} if wraps else {gate: part[:half], up: part[half:]}
            for module, each in cut.items():
                half_name = f"lora_{'A' if is_a else 'B'}.weight"
                tensors[f"{stem}.{parent}.experts.{number}.{module}.{half_name}"] = each.clone()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = json.loads((own / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(settings | {"target_parameters": None}))
    (prompt,) = random_prompts(4, [17])
    wanted: Any = {"prompt_token_ids": prompt}
    llm = stages[0].llm
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    output = llm.generate(wanted, params, use_tqdm=False, lora_request=LoRARequest("separate", 9, str(directory)))[0]
    assert list(output.outputs[0].token_ids) == stages[0].reference.greedy(prompt, "experts", 24)


def test_experts_that_do_not_fit_are_refused_by_name(stages: tuple[Stage, Stage], tmp_path: Path) -> None:
    own = stages[0].paths["experts"]
    tensors = load_file(own / "adapter_model.safetensors")
    name = next(each for each in tensors if ".experts." in each and "lora_A" in each)
    for wrong, words in (
        ({name: torch.zeros(8 * COUNT - 1, tensors[name].shape[1])}, "is it an adapter of this model"),
        ({name.replace("layers.0", "layers.9"): tensors[name].clone()}, "this model has no such experts"),
    ):
        directory = tmp_path / words[:6]
        directory.mkdir()
        save_file(tensors | wrong, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text((own / "adapter_config.json").read_text())
        with pytest.raises(RequestError, match=words):
            stages[0].llm.generate("x", lora_request=LoRARequest("wrong", 1, str(directory)), use_tqdm=False)


def test_the_expert_of_all_tokens_is_changed_as_by_peft(tmp_path: Path) -> None:
    """With its gate, beside rows without an adapter."""
    sizes = SHAPES["Qwen3MoeForCausalLM"] | {"shared_expert_intermediate_size": 40, "num_key_value_heads": 4}
    model = make_tiny(tmp_path / "model", "Qwen2MoeForCausalLM", **{**sizes, "head_dim": 12})
    modules = ("gate_proj", "up_proj", "down_proj", "shared_expert_gate", "o_proj")
    stage = Stage(tmp_path / "adapters", model, {"shared": {"rank": 8, "modules": modules}})
    try:
        names, prompts = ["shared", None, "shared"], random_prompts(5, [9, 21, 33])
        for prompt, name, output in zip(prompts, names, stage.generate(prompts, names, max_tokens=24), strict=True):
            assert list(output.outputs[0].token_ids) == stage.reference.greedy(prompt, name, 24), name
    finally:
        stage.llm.close()
