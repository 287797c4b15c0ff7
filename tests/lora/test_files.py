"""What is read of an adapter's files, and that everything else is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.lora.files import read_adapter
from quire.models.lora.updates import LowRankUpdates
from quire.models.quantization.scheme import ExpertNames, ExpertsShape
from tests.lora.adapter_files import HIDDEN, PREFIX, WIDTH, Base, pair, small_updates, whole, write


def products(directory: Path) -> dict[str, Tensor]:
    """By module, scale · B A as a slot has it."""
    updates = small_updates()
    adapter = read_adapter(directory, updates, torch.float64, Base)
    views = list(updates.views(adapter.weights[None]))
    found = {}
    for name, target in updates.targets.items():
        part = target.part
        assert part is not None
        a, b, *_ = views[part.update]
        own = a[0, part.module * updates.rank : (part.module + 1) * updates.rank]
        found[name.rpartition(".")[2]] = b[0, part.outputs] @ own
        assert int(adapter.ranks[0, part.update]) in (0, 4, 6)
    return found


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 3}, 0.75),
        ({"alpha_pattern": {"k_proj": 5, ".*down_proj": 8}}, {"k_proj": 1.25, "down_proj": 2.0}),
        ({"alpha_pattern": {"proj": 5}}, 2.0),
    ],
)
def test_each_module_has_its_own_product_and_scale(tmp_path: Path, settings: dict[str, Any], scale: Any) -> None:
    tensors = whole()
    found = products(write(tmp_path / "a", tensors, **settings))
    for module in ("k_proj", "down_proj"):
        at = f"{PREFIX}.{'mlp' if module == 'down_proj' else 'self_attn'}.{module}"
        a, b = tensors[f"{at}.lora_A.weight"].double(), tensors[f"{at}.lora_B.weight"].double()
        factor = scale[module] if isinstance(scale, dict) else scale
        torch.testing.assert_close(found[module], factor * (b @ a), rtol=1e-6, atol=1e-6)
    assert not found["q_proj"].any()
    assert not found["v_proj"].any()


def test_modules_may_have_ranks_of_their_own(tmp_path: Path) -> None:
    tensors = pair("self_attn.k_proj", 6, 4, HIDDEN) | pair("mlp.down_proj", 4, HIDDEN, WIDTH)
    found = products(write(tmp_path / "a", tensors, rank_pattern={"k_proj": 6}, use_rslora=True))
    a, b = (tensors[f"{PREFIX}.self_attn.k_proj.lora_{half}.weight"].double() for half in "AB")
    torch.testing.assert_close(found["k_proj"], 8 / math.sqrt(6) * (b @ a), rtol=1e-6, atol=1e-6)


def renamed(old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in whole().items()}


def with_one(name: str, tensor: Tensor | None = None) -> dict[str, Tensor]:
    return whole() | {f"{PREFIX}.{name}": torch.zeros(4) if tensor is None else tensor}


def with_magnitudes(count: int, module: str = "") -> dict[str, Tensor]:
    """Of two modules, or of one."""
    own = {name: tensor for name, tensor in whole().items() if module in name}
    sizes = {"self_attn.k_proj": count, "mlp.down_proj": HIDDEN}
    return own | {
        f"{PREFIX}.{name}.lora_magnitude_vector": torch.rand(size) + 1 for name, size in sizes.items() if module in name
    }


def without(name: str) -> dict[str, Tensor]:
    return {each: tensor for each, tensor in whole().items() if name not in each}


def spoilt(name: str, value: float) -> dict[str, Tensor]:
    """One value of one tensor is another."""
    tensors = whole()
    tensors[f"{PREFIX}.{'mlp' if 'down' in name else 'self_attn'}.{name}.weight"][1, 2] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        (with_one("self_attn.k_proj.lora_magnitude_vector"), {}, ["k_proj.lora_magnitude_vector", "use_dora is not"]),
        (None, {"use_dora": True}, ["lora_A.weight", "no magnitudes"]),
        (with_magnitudes(3), {"use_dora": True}, ["k_proj.lora_magnitude_vector is [3]", "[4]"]),
        (with_magnitudes(4, "down_proj"), {"use_dora": True}, ["mlp.down_proj", "quantized", "merge"]),
        (with_magnitudes(4, "k_proj"), {"use_dora": True, "lora_alpha": 0}, ["self_attn.k_proj", "all 0"]),
        (spoilt("k_proj.lora_A", math.nan), {}, ["k_proj.lora_A.weight has values that are not finite"]),
        (spoilt("down_proj.lora_B", math.inf), {}, ["down_proj.lora_B.weight has values that are not finite"]),
        (with_one("self_attn.k_proj.bias"), {}, ["k_proj.bias", "biases"]),
        (with_one("self_attn.k_proj.lora_B.bias"), {}, ["lora_B.bias", "biases"]),
        (with_one("embed_tokens.lora_embedding_A"), {}, ["lora_embedding_A", "embeddings"]),
        (with_one("embed_tokens.weight"), {}, ["embed_tokens.weight", "embeddings are not served"]),
        (with_one("norm.weight"), {}, ["norm.weight", "no tensor of a LoRA adapter"]),
        (with_one("mlp.experts.0.lora_A.weight"), {}, ["experts.0.lora_A", "experts"]),
        (with_one("lm_head.lora_A.weight"), {}, ["lm_head.lora_A", "head"]),
        (renamed("layers.0", "layers.7"), {}, ["layers.7", "down_proj, k_proj, q_proj, v_proj"]),
        (renamed("k_proj", "kv_proj"), {}, ["kv_proj", "may change"]),
        (without("k_proj.lora_A"), {}, ["k_proj.lora_B.weight has no other half"]),
        (without("down_proj.lora_B"), {}, ["down_proj.lora_A.weight has no other half"]),
        (pair("self_attn.k_proj", 4, 4, HIDDEN + 1), {}, ["k_proj.lora_A.weight is [4, 13]", "[4, 12]"]),
        (pair("self_attn.k_proj", 4, 5, HIDDEN), {}, ["k_proj.lora_B.weight is [5, 4]", "[4, 4]"]),
        (pair("self_attn.k_proj", 6, 4, HIDDEN), {}, ["k_proj.lora_A.weight is [6, 12]"]),
        (whole(9), {"r": 9}, ["lora_A.weight has rank 9, more than --max-lora-rank 8"]),
        ({name: t.to(torch.int64) for name, t in whole().items()}, {}, ["lora_A.weight is of type I64"]),
        ({}, {}, ["has no tensors"]),
        (b"", {}, ["broken"]),
        (b"\xff" * 100, {}, ["broken"]),
        (None, {"bias": "all"}, ["bias"]),
        (None, {"lora_bias": True}, ["lora_bias"]),
        (None, {"modules_to_save": ["lm_head"]}, ["modules_to_save ['lm_head']", "merge"]),
        (None, {"init_lora_weights": "pissa"}, ["init_lora_weights 'pissa'", "base model"]),
        (None, {"layer_replication": [[0, 1]]}, ["layer_replication", "not served"]),
        (None, {"alora_invocation_tokens": [1]}, ["alora_invocation_tokens"]),
        (None, {"a_new_variant": {"x": 1}}, ["a_new_variant"]),
        (None, {"peft_type": "IA3"}, ["peft_type"]),
        (None, {"r": "missing"}, ["'r'"]),
        (None, {"r": 0}, ["0 is no rank"]),
        (None, {"r": "four"}, ["wrong"]),
        (None, {"r": math.inf}, ["wrong"]),
        (None, {"lora_alpha": None}, ["wrong"]),
        (None, {"lora_alpha": 10**400}, ["wrong"]),
        (None, {"rank_pattern": {"(": 4}}, ["wrong"]),
    ],
)
def test_what_does_not_serve_is_refused_by_name(
    tmp_path: Path, tensors: Any, settings: dict[str, Any], words: list[str]
) -> None:
    directory = write(tmp_path / "a", tensors, **settings)
    with pytest.raises(CheckpointError) as refused:
        read_adapter(directory, small_updates(), torch.float32, Base)
    for word in words:
        assert word in refused.value.message
    assert str(directory) in refused.value.message


@pytest.mark.parametrize(("device", "stacked"), [("cuda", False), ("cpu", True)])
def test_magnitudes_of_experts_are_refused_where_they_are_not_served(
    tmp_path: Path, device: str, stacked: bool
) -> None:
    updates = LowRankUpdates(2, 8, device)
    updates.updates_of_experts(ExpertsShape("model.layers.0.mlp.experts", ExpertNames(), 3, HIDDEN, WIDTH))
    if stacked:
        tensors = pair("mlp.experts", 3 * 4, HIDDEN, WIDTH)
    else:
        tensors = pair("mlp.experts.1.down_proj", 4, HIDDEN, WIDTH)
        assert read_adapter(write(tmp_path / "b", tensors), updates, torch.float32, Base).ranks.any()
    module = next(iter(tensors)).partition(".lora_")[0]
    magnitudes = {f"{module}.lora_magnitude_vector": torch.ones(HIDDEN)}
    with pytest.raises(CheckpointError, match=r"experts.*lora_magnitude_vector: DoRA of experts"):
        read_adapter(write(tmp_path / "a", tensors | magnitudes, use_dora=True), updates, torch.float32, Base)


def test_files_that_are_not_there_or_not_safe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no adapter of PEFT"):
        read_adapter(tmp_path, small_updates(), torch.float32, Base)
    directory = write(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors: save the adapter.$"):
        read_adapter(directory, small_updates(), torch.float32, Base)
    (tmp_path / "weights").rename(directory / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="may run code"):
        read_adapter(directory, small_updates(), torch.float32, Base)
    (directory / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        read_adapter(directory, small_updates(), torch.float32, Base)


def test_the_digest_says_what_an_adapter_computes(tmp_path: Path) -> None:
    """Nothing else: where it lies and what it is called is not in it."""

    def digest(name: str, tensors: dict[str, Tensor], **settings: Any) -> str:
        return read_adapter(write(tmp_path / name, tensors, **settings), small_updates(), torch.float32, Base).digest

    tensors = whole()
    first = digest("a", tensors)
    assert first == digest("b", tensors, lora_dropout=0.5, base_model_name_or_path="x")
    name = next(iter(tensors))
    other = tensors | {name: tensors[name] + 1e-3}
    assert len({first, digest("c", tensors, lora_alpha=9), digest("d", other), digest("e", without("k_proj"))}) == 4
