"""SmolLM2-135M as its GGUF file ships, against transformers on the same dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from tests.real_weights.packages import SMOLLM2

TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are:",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n",
    "To make bread, you need flour, water,",
    "In 1969, the first humans",
    "SELECT name, age FROM",
    "La Tour Eiffel est",
    "The mitochondria is",
    "import numpy as np\n\n",
    "Roses are red, violets are blue,",
    "Water boils at",
    "1, 1, 2, 3, 5, 8, 13,",
    "Shakespeare wrote",
    "The opposite of hot is cold. The opposite of up is",
    "<html>\n<head>\n",
    "My favourite animal is the cat because",
    "Photosynthesis is the process by which plants turn light into energy. " * 8 + "In short,",
]


@pytest.mark.long("engine")
def test_greedy_tokens_are_those_of_transformers() -> None:
    """A sequence is transformers' own greedy one if each of its tokens has the largest logit behind those before it."""
    directory = SMOLLM2.directory()
    (file,) = directory.glob("*.gguf")
    with LLM(str(file), dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))
    theirs = _reference(directory, file.name)
    for output in outputs:
        prompt, generated = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
        assert len(generated) == TOKENS
        logits = theirs(input_ids=torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == generated, output.prompt


@torch.inference_mode()
def _reference(directory: Path, file: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=torch.float32)
    return model.eval().requires_grad_(False)
