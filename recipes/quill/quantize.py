"""Quantizes Quill with llm-compressor, to see what each scheme costs.

    python recipes/quill/quantize.py --scheme w4a16-g64 --model quire/builtin/quill --output DIR

Needs llmcompressor, in an environment of its own: it wants an older transformers than Quire. GPTQ calibrates on
training conversations, among which there is no held-out question.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from quill.chat import render
from quill.corpus import conversation
from transformers import AutoModelForCausalLM, AutoTokenizer

CONVERSATIONS = 64
LONGEST = 1024
SCHEMES = ("fp8", "w8a8", "w8a16", "w4a16-g64", "w4a16-g64-rtn", "w4a16-g32-asym")
"""fp8, w8a8: by channel, activations by token. w8a16: groups of 128 columns. w4a16: GPTQ, or the nearest code (rtn)."""


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    groups = {"group_0": _scheme(options.scheme)}
    if options.scheme.startswith("w4") and not options.scheme.endswith("rtn"):
        recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
        oneshot(
            model=model,
            dataset=_calibration(tokenizer),
            recipe=recipe,
            max_seq_length=LONGEST,
            num_calibration_samples=CONVERSATIONS,
        )
    else:
        oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]))
    model.save_pretrained(options.output, save_compressed=True)
    tokenizer.save_pretrained(options.output)


def _scheme(name: str) -> QuantizationScheme:
    presets = {"fp8": "FP8_DYNAMIC", "w8a8": "INT8", "w8a16": "W8A16"}
    if name in presets:
        return preset_name_to_scheme(presets[name], ["Linear"])
    group = int(name.split("-")[1].removeprefix("g"))
    weights = QuantizationArgs(num_bits=4, symmetric=not name.endswith("asym"), strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def _calibration(tokenizer: AutoTokenizer) -> Dataset:
    rng = Random("calibration")
    texts = [render(conversation(rng)) for _ in range(CONVERSATIONS)]
    return Dataset.from_list([tokenizer(text, truncation=True, max_length=LONGEST) for text in texts])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantizes Quill with llm-compressor.")
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help="how")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
