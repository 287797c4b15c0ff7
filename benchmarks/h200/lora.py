"""What LoRA adapters cost a decode step: Llama-3.1-8B's shape, all seven projections, random weights. Of a mixture of
experts whose layers are all alike (Qwen3-30B-A3B), projections of attention and all experts.

    python benchmarks/h200/lora.py --model DIR [--rank 16] [--batch 32] [--adapters 0,1,8,32] [--profile]

Prints a JSON line for the engine without adapters, then one for each number of adapters that the rows of a step share,
with how many times as long its step takes. Adapters share one file of random weights, and differ by their scale; on the
device each has memory of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from serving import vocabulary
from step_profile import decode_profile, of_this_process
from workloads import Prompt, Workloads

from quire import LLM, LoRARequest, SamplingParams

_SPREAD = 1e-3
_SETTINGS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4_096}


class Engine:
    """What is measured, as a `Generate`; row i has adapter i modulo `adapters`."""

    def __init__(self, model: str, **settings: Any) -> None:
        self._llm = LLM(model, **_SETTINGS, **settings)
        self.adapters: Sequence[LoRARequest] = ()
        self.startup = sum(self._llm.startup.values())

    def __call__(self, prompts: Sequence[Prompt], outputs: Sequence[int], **sampling: Any) -> float:
        params = [SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
                  for n in outputs]  # fmt: skip
        own = self.adapters
        asked = [own[i % len(own)] if own else None for i in range(len(prompts))]
        began = time.perf_counter()
        self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, lora_request=asked
        )
        return time.perf_counter() - began

    def close(self) -> None:
        self._llm.close()


def make_adapters(directory: Path, model: Path, rank: int, number: int) -> list[LoRARequest]:
    """Adapters of all seven projections, or of attention's and of experts."""
    config = json.loads((model / "config.json").read_text())
    hidden, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden, 1), "self_attn.k_proj": (kv, hidden, 1), "self_attn.v_proj": (kv, hidden, 1),
        "self_attn.o_proj": (hidden, q, 1),
    }  # fmt: skip
    if (experts := config.get("num_experts", config.get("num_local_experts"))) is None:
        shapes |= {f"mlp.{name}_proj": (width, hidden, 1) for name in ("gate", "up")}
        shapes["mlp.down_proj"] = (hidden, width, 1)
    else:  # as PEFT stacks them
        width = config.get("moe_intermediate_size", width)
        shapes |= {"mlp.experts.base_layer": (2 * width, hidden, experts), "mlp.experts": (hidden, width, experts)}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns, count) in shapes.items():
            for half, shape in (("A", (count * rank, columns)), ("B", (rows, rank * count))):
                values = torch.empty(shape).uniform_(-_SPREAD, _SPREAD).bfloat16()
                tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"] = values
    save_file(tensors, directory / "weights.safetensors")
    made = []
    for index in range(number):
        own = directory / f"adapter-{index}"
        own.mkdir()
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + index, "bias": "none"}
        (own / "adapter_config.json").write_text(json.dumps(settings))
        (own / "adapter_model.safetensors").symlink_to(directory / "weights.safetensors")
        made.append(LoRARequest(own.name, index + 1, str(own)))
    return made


def step_ms(engine: Engine, ids: int, batch: int, runs: int) -> float:
    """The best of some runs."""
    workloads = Workloads(engine, ids, seed=time.time_ns())
    workloads.warm_up()
    return min(next(iter(workloads.decode(batch).values())) for _ in range(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", default="0,1,8,32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    numbers = [int(each) for each in arguments.adapters.split(",")]
    batch, ids = arguments.batch, vocabulary(Path(arguments.model))
    settings = {"max_num_seqs": max(batch, 8), "max_cudagraph_capture_size": batch}
    engine = Engine(arguments.model, **settings)
    off = step_ms(engine, ids, batch, arguments.runs)
    print(json.dumps({"adapters": "off", "batch": batch, "ms": off, "start_s": engine.startup}), flush=True)
    engine.close()
    with tempfile.TemporaryDirectory() as directory:
        made = make_adapters(Path(directory), Path(arguments.model), arguments.rank, max(numbers))
        lora = {"enable_lora": True, "max_loras": max(1, *numbers), "max_lora_rank": arguments.rank}
        engine = Engine(arguments.model, **settings, **lora)
        for number in numbers:
            engine.adapters = made[:number]
            began = time.perf_counter()
            engine([[1] * 16] * max(1, number), [1] * max(1, number))
            first_use = time.perf_counter() - began
            ms = step_ms(engine, ids, batch, arguments.runs)
            line = {"adapters": number, "batch": batch, "rank": arguments.rank, "ms": ms, "times_off": ms / off,
                    "first_use_s": first_use, "start_s": engine.startup}  # fmt: skip
            print(json.dumps(line), flush=True)
            if arguments.profile and number:
                workloads = Workloads(engine, ids, seed=1)
                print("\n".join(decode_profile(engine, of_this_process, workloads, batch)), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
