"""LoRA adapters of tiny checkpoints, made by PEFT, and what PEFT computes with them: the reference of LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path | str, model: Path, rank: int = 8, modules: Sequence[str] = ALL, seed: int = 0, std: float = 0.1,
    **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter of a model, of random weights, as PEFT saves it; `config` is LoraConfig's."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"lora_alpha": 2 * rank, "task_type": "CAUSAL_LM"} | config
    adapted = get_peft_model(base, LoraConfig(r=rank, target_modules=list(modules), **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + std * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.normal_(0.0, std, generator=generator)
    adapted.save_pretrained(str(directory))
    return Path(directory)


class Reference:
    """PEFT's own model with adapters.

    Args:
        model: The base model's directory.
        adapters: Directories, by name.
    """

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
        first, *others = adapters.items()
        self._model: Any = PeftModel.from_pretrained(base, str(first[1]), adapter_name=first[0])
        for name, path in others:
            self._model.load_adapter(str(path), adapter_name=name)
        self._model.eval()

    def logits(self, tokens: Sequence[int], adapter: str | None) -> Any:
        """[tokens, vocab] fp32; of the base model without an adapter."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            if adapter is None:
                with self._model.disable_adapter():
                    return self._model(ids).logits[0]
            self._model.set_adapter(adapter)
            return self._model(ids).logits[0]

    def greedy(self, prompt: Sequence[int], adapter: str | None, count: int) -> list[int]:
        """The likeliest tokens, one after the other."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, adapter)[-1].argmax()))
        return tokens[len(prompt) :]
