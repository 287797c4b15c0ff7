"""Every scheme with every kind of layer, beside transformers on the dense weights that the codes stand for.

`dense` layers of powers of two are test_checkpoints.py's; here are experts, and tied heads beside sizes that are no
powers of two. Ranks that divide a model are test_divided.py's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError
from tests.checkpoints import edit_config, make_llama, make_tiny
from tests.models.forward import logits_of
from tests.parity.cases import CASES
from tests.quantization import made
from tests.quantization.test_checkpoints import WEIGHT_ONLY, WITH_ACTIVATIONS, error

TOKENS = torch.randint(3, 320, (24,), generator=torch.Generator().manual_seed(4))
EXPERTS: dict[str, Any] = CASES["mixtral"] | {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_local_experts": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "shards": None,
}
TIED_AND_ODD = {
    "hidden": 384,
    "heads": 3,
    "kv_heads": 1,
    "intermediate": 640,
    "layers": 1,
    "tie": True,
    "vocab_size": 333,
}
"""In groups of up to 128 columns."""
WITHOUT_GROUPS = TIED_AND_ODD | {"hidden": 72, "intermediate": 104}
LAYERS = ("experts", "tied head, odd sizes")
EVERY = WEIGHT_ONLY | WITH_ACTIVATIONS
NEAR = dict.fromkeys(WITH_ACTIVATIONS, 0.06) | dict.fromkeys(WEIGHT_ONLY, 1e-5)
NEAR["int8, channels"] = 0.02


def make(directory: Path, case: str, layers: str) -> Path:
    """The model with dense weights."""
    std = 0.05 if case in WITH_ACTIVATIONS else 0.2
    if layers == "experts":
        return make_tiny(directory, **EXPERTS | {"std": std})
    shape = WITHOUT_GROUPS if case in WITH_ACTIVATIONS else TIED_AND_ODD
    return make_llama(directory, **shape, tokenizer=False, std=std)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("case", EVERY)
@torch.inference_mode()
def test_logits_are_those_of_the_dense_weights(case: str, layers: str, tmp_path: Path) -> None:
    directory = make(tmp_path / "model", case, layers)
    config, quantize = EVERY[case]
    if layers == "experts" and "ignore" in config:
        config = config | {"ignore": [*config["ignore"], "re:.*gate$"]}  # as llm-compressor's recipes do
    dense = made.quantize(directory, config, quantize)
    assert error(logits_of(directory, TOKENS, torch.float32), dense, TOKENS) < NEAR[case]


@torch.inference_mode()
def test_experts_may_lie_in_one_tensor_as_gpt_oss_has_them(tmp_path: Path) -> None:
    """Made from the published layout: gates and ups in turn, blocks of 16 bytes, only experts quantized."""
    shape = CASES["qwen3 moe, one expert a token"] | {"moe_intermediate_size": 64, "hidden_size": 96}
    directory = make_tiny(tmp_path / "model", **shape | {"num_hidden_layers": 1, "generation": 5})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    single = partial(made.microscaled, codes_name="blocks", scales_name="scales")
    dense = made.quantize(directory, config, single, lambda name: ".experts." in name)
    alone = logits_of(directory, TOKENS, torch.float32)
    stack(directory, experts=4)
    stacked = logits_of(directory, TOKENS, torch.float32)
    assert torch.equal(stacked, alone)
    assert error(stacked, dense, TOKENS) < 1e-5


def stack(directory: Path, experts: int) -> None:
    """Put the blocks and scales of single experts into one tensor a layer."""
    stored, name = load_file(directory / "model.safetensors"), "model.layers.0.mlp.experts"
    for kind in ("blocks", "scales"):
        of = {
            part: torch.stack([stored.pop(f"{name}.{number}.{part}_proj.{kind}") for number in range(experts)])
            for part in ("gate", "up", "down")
        }
        in_turn = torch.stack((of["gate"], of["up"]), 2).flatten(1, 2)
        for part, whole in (("gate_up", in_turn), ("down", of["down"])):
            blocks = whole.unflatten(2, (-1, 16)) if kind == "blocks" else whole
            stored[f"{name}.{part}_proj_{kind}"] = blocks.contiguous()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})


def test_columns_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **WITHOUT_GROUPS, tokenizer=False)
    with pytest.raises(CheckpointError, match="64 must divide its columns"):
        logits_of(directory, TOKENS, torch.float32, "bitsandbytes")
    edit_config(directory, {"quantization_config": EVERY["mxfp4, quark"][0]})
    with pytest.raises(CheckpointError, match="32 must divide its columns"):
        logits_of(directory, TOKENS, torch.float32)
