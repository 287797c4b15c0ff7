"""What the fallback cannot serve is refused by name, and no model is served that computes wrongly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.errors import CheckpointError, ConfigError, SetupError
from quire.foundation.config import environment
from quire.models.fallback import paged, products, spec
from quire.models.fallback.description import Description
from quire.models.spec import read_spec
from tests.checkpoints import edit_config, make_llama
from tests.models.fallback.checkpoints import make

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20,
    "skip_tokenizer_init": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make(tmp_path / "model", "DiffLlamaForCausalLM")


def test_transformers_is_not_installed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"DiffLlamaForCausalLM is served by .* pip install 'quire\[transformers\]'"):
        read_spec(checkpoint)


def test_own_layers_only(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'architectures' is \['DiffLlamaForCausalLM'\], it is not supported"):
        read_spec(checkpoint, None, "quire")


def test_remote_code(checkpoint: Path) -> None:
    """The code that config.json names would leave a file; it is never run, not even found."""
    code = checkpoint / "modeling_evil.py"
    code.write_text(f"open({str(checkpoint / 'ran')!r}, 'w')")
    edit_config(checkpoint, {"model_type": "evil", "auto_map": {"AutoConfig": "modeling_evil.EvilConfig"}})
    with pytest.raises(
        CheckpointError, match=r"'evil' needs remote code \(auto_map in config.json\), which is never run"
    ):
        read_spec(checkpoint)
    edit_config(checkpoint, {"model_type": "diffllama"})
    assert read_spec(checkpoint).fallback is not None  # transformers has a class of its own
    assert not (checkpoint / "ran").exists()


def test_unknown_model_type(checkpoint: Path) -> None:
    edit_config(checkpoint, {"model_type": "of_tomorrow"})
    with pytest.raises(CheckpointError, match="has no model_type 'of_tomorrow': install a newer transformers"):
        read_spec(checkpoint)


def test_heads_of_other_kinds(checkpoint: Path) -> None:
    edit_config(checkpoint, {"architectures": ["DiffLlamaForQuestionAnswering"]})
    with pytest.raises(CheckpointError, match=r"DiffLlamaForQuestionAnswering.* give another model"):
        read_spec(checkpoint)


def test_quantized_checkpoints(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="compute dense weights only"):
        read_spec(checkpoint, "fp8")
    edit_config(checkpoint, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(CheckpointError, match="compute dense weights only"):
        read_spec(checkpoint)


REFUSED: dict[str, dict[str, Any]] = {
    "--tensor-parallel-size": {"tensor_parallel_size": 2},
    "--pipeline-parallel-size": {"pipeline_parallel_size": 2},
    "--enable-expert-parallel": {"enable_expert_parallel": True},
    "--enable-lora": {"enable_lora": True},
    "--speculative-config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "--kv-cache-dtype": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_settings(flag: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} is not served where transformers' modules compute a model"):
        LLM(str(checkpoint), **SETTINGS, **REFUSED[flag])


def test_own_caches_are_not_swapped(tmp_path: Path) -> None:
    directory = make(tmp_path / "bloom", "BloomForCausalLM")
    with pytest.raises(ConfigError, match=r"^--preemption-mode .* Give recompute"):
        LLM(str(directory), **SETTINGS, model_impl="transformers", preemption_mode="swap")


def test_bidirectional_attention(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", "RobertaForCausalLM", is_decoder=False)
    with pytest.raises(CheckpointError, match=r"its logits differ by .* it would answer wrongly, so it is not served"):
        LLM(str(directory), **SETTINGS, model_impl="transformers")


def _scaled(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, query, key, value: attention(self, query * 1.01, key, value)


def _shifted(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, query, key, value: attention(self, query, key, value.roll(1, 2))


@pytest.mark.parametrize("mutation", [_scaled, _shifted])
def test_wrong_attention(mutation: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged.PagedAttention, "__call__", mutation(paged.PagedAttention.__call__))
    with pytest.raises(
        CheckpointError, match=r"its logits differ by \d\.\de[+-]\d\d of the largest .*0.0001 is allowed"
    ):
        LLM(str(checkpoint), **SETTINGS)


def test_wrong_sequences(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that mixes tokens of one step beside its attention is refused, since they are of several sequences."""
    from quire.models.fallback.halves import Halves

    hidden = Halves.hidden

    def mixed(self: Halves, tokens: Tensor, **inputs: Any) -> Any:
        found, output = hidden(self, tokens, **inputs)
        return found + 0.1 * found.mean(0), output

    monkeypatch.setattr(Halves, "hidden", mixed)
    with pytest.raises(CheckpointError, match="its logits differ"):
        LLM(str(checkpoint), **SETTINGS)


def test_missing_and_foreign_weights(checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    with pytest.raises(CheckpointError, match=rf"do not match DiffLlamaForCausalLM[^$]*{name}: missing"):
        LLM(str(checkpoint), **SETTINGS)
    save_file(tensors | {name: tensors[name][1:].contiguous()}, file)
    with pytest.raises(CheckpointError, match=rf"{name}: expected \[96, 64\], found \[95, 64\]"):
        LLM(str(checkpoint), **SETTINGS)
    save_file(tensors | {"foreign.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"foreign\.weight: DiffLlamaForCausalLM has no such weight"):
        LLM(str(checkpoint), **SETTINGS)


def test_native_models_do_not_load_transformers(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "llama")
    program = (
        "import sys; from quire import LLM; "
        f"LLM({str(directory)!r}, dtype='float32', device='cpu', max_model_len=64, kv_cache_memory_bytes=8 << 20); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_process_without_torch_asks_another_one(checkpoint: Path) -> None:
    """It gets the same description, or the same error."""
    found = spec._describe_elsewhere(checkpoint, spec._INSPECTION, Description)
    assert found == spec.describe(checkpoint, "DiffLlamaForCausalLM")
    edit_config(checkpoint, {"architectures": ["DiffLlamaForQuestionAnswering"]})
    with pytest.raises(SetupError, match="give another model"):
        spec._describe_elsewhere(checkpoint, spec._INSPECTION, Description)


def test_weights_that_are_read_elsewhere_stay(checkpoint: Path) -> None:
    """A linear layer keeps torch's layout where anything but its own forward takes its weight."""

    class Model(torch.nn.Module):
        all_tied_weights_keys = None

        def __init__(self) -> None:
            super().__init__()
            self.plain, self.read = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    with torch.device("meta"):
        model = Model()

    def run() -> None:
        x = torch.empty(2, 4, device="meta")
        torch.nn.functional.linear(model.plain(x), model.read.weight)

    assert products.find_products(model, run) == [[model.plain]]  # type: ignore[arg-type]
