"""Answers questions with a saved checkpoint through transformers: batched, greedy, the longest prompts first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quill.chat import Sample, render

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@torch.inference_mode()
def answer_all(
    directory: Path, samples: Sequence[Sample], dtype: torch.dtype, device: torch.device, batch: int, max_tokens: int
) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(device).eval()
    prompts = [render(sample.question, add_generation_prompt=True) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: -len(prompts[i]))
    answers = [""] * len(samples)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True).to(device)
        output = model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        written = output[:, inputs["input_ids"].shape[1] :]
        for i, text in zip(chosen, tokenizer.batch_decode(written, skip_special_tokens=True), strict=True):
            answers[i] = text
    return answers
