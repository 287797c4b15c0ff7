"""Prompt lookup's own case: a model that repeats a text of its prompt with one change, one sequence, greedily.

    python benchmarks/copying.py [--shape small] [--drafts 8] [--repeats 3]
    python benchmarks/h200/speculation.py --copy [--shape large]

Quill cannot copy a text. So a model of GPT-2's shape is made that says a given text, whatever it reads: its embedding
of each position points to the token that comes there, and its layers, which have random weights, change that too little
to matter. All it computes is what a trained model of that shape computes; drafts are verified as ever.
Engines are one without speculation, one with `ngram` and one with `suffix`, in turns. One line of JSON each: tokens a
second behind the first token, the median of the turns after the first, and `ratio` to those without speculation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams

TEXT = """\
The small red boat left the harbour at dawn, before the market had opened. Its captain, a quiet woman named Ada,
had packed bread, apples, a lamp and a map of the coast. She had sailed along these cliffs since she was a girl,
and she knew each rock by its shape and each village by its smoke. By noon the wind had turned, and grey clouds
stood over the hills. She took down the sail, tied the boat to an old iron ring and waited under the bridge. A
gull sat on the mast and watched her eat. When the rain had passed she could see the lighthouse again, white
against the dark sea, and behind it the first lamps of the town. Two boys ran along the wall and waved. She
waved back, pulled the rope free and let the stream carry her out. It was late when she came home, and her
brother stood on the pier with a coat and a pot of soup. He asked what she had seen. Nothing, she said, and
everything, and she told him about the gull."""
CHANGE = ("a coat and a pot of soup", "a blanket and a jar of honey")
SHAPES = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 4},
    "small": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
}
"""Of GPT-2."""


def texts() -> tuple[list[int], list[int]]:
    """The text, and the text with its change, as tokens of Quill's vocabulary."""
    from tokenizers import Tokenizer

    from quire.builtin import path

    flowing = TEXT.replace("\n", " ")
    tokenizer = Tokenizer.from_file(str(path("quill") / "tokenizer.json"))
    first, second = (tokenizer.encode(text).ids for text in (flowing, flowing.replace(*CHANGE)))
    assert first != second
    return first, second


def make_model(directory: Path, shape: str, prompt: int, says: list[int], vocab_size: int = 8_192) -> Path:
    """A checkpoint that says these tokens behind a prompt of so many, greedily."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=vocab_size, n_positions=1024, bos_token_id=0, eos_token_id=0, **SHAPES[shape])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    with torch.no_grad():
        tokens, positions = model.transformer.wte.weight, model.transformer.wpe.weight
        tokens.copy_(torch.nn.functional.normalize(torch.randn(tokens.shape), dim=1))
        for place, token in enumerate(says):
            positions[prompt - 1 + place] = 30 * tokens[token]
        for block in model.transformer.h:
            block.attn.c_proj.weight.mul_(0.1)
            block.mlp.c_proj.weight.mul_(0.1)
    model.save_pretrained(directory)
    return directory


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A figure for each engine."""
    prompt, says = texts()
    methods: dict[str, dict[str, Any]] = {
        "off": {},
        "ngram": {"method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_min": 3},
        "suffix": {"method": "suffix", "num_speculative_tokens": options.drafts,
                   "suffix_decoding_max_cached_requests": 0},
    }  # fmt: skip
    shared: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 4, "skip_tokenizer_init": True, "swap_space": 0,
        "num_gpu_blocks_override": 200, "enable_prefix_caching": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory) / "model", options.shape, len(prompt), says))
        engines = {
            name: LLM(model, **shared, **({"speculative_config": method} if method else {}))
            for name, method in methods.items()
        }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(1 + options.repeats):
        for name, engine in engines.items():
            first = _seconds(engine, prompt, says[:1])
            whole = _seconds(engine, prompt, says)
            if turn:
                rates[name].append((len(says) - 1) / (whole - first))
    plain = statistics.median(rates["off"])
    found = [
        {
            "case": f"repeat with one change, GPT-2 {options.shape}", "prompt": len(prompt), "output": len(says),
            "engine": name, "drafts": options.drafts, "tokens_per_s": round(statistics.median(own), 1),
            "ratio": round(statistics.median(own) / plain, 2), "spread": round(max(own) / min(own), 2),
        }
        for name, own in rates.items()
    ]  # fmt: skip
    for engine in engines.values():
        engine.close()
    return found


def _seconds(engine: LLM, prompt: list[int], says: list[int]) -> float:
    """That it takes to say it; it must say it."""
    params = SamplingParams(temperature=0, max_tokens=len(says), ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert list(output.outputs[0].token_ids) == says
    return seconds


def arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """The options."""
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(**defaults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    for figure in compare(parser.parse_args()):
        print(json.dumps(figure))


if __name__ == "__main__":
    main()
