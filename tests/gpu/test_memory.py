"""A card that is filled to its share survives the largest steps: many sequences beside very long prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
}  # fmt: skip
SHARE = 0.9


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60e9,
    reason="needs a GPU with 60 GB",
)
def test_512_sequences_beside_prompts_of_33k_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 512}
    rnd = random.Random(0)
    lengths = [300] * 200 + [33_000] * 6 + [300] * 300 + [33_000] * 6
    prompts = [{"prompt_token_ids": [rnd.randrange(128_000) for _ in range(n)]} for n in lengths]
    drawing = SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.95, logprobs=5, frequency_penalty=0.1, seed=1
    )
    plain = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    with LLM(str(tmp_path), gpu_memory_utilization=SHARE, **settings) as llm:
        outputs = llm.generate(prompts, [drawing if i % 3 else plain for i in range(len(prompts))], use_tqdm=False)
        reserved = torch.cuda.memory_reserved()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * len(prompts)
    total = torch.cuda.get_device_properties(0).total_memory
    assert reserved <= SHARE * total
