"""A whole engine on a quantized checkpoint generates what transformers does with the weights that it stands for."""

from __future__ import annotations

from pathlib import Path

from quire import LLM, SamplingParams
from tests.checkpoints import make_llama
from tests.quantization import made
from tests.quantization.test_checkpoints import SHAPE, WEIGHT_ONLY
from tests.reference import Reference


def test_greedy_tokens_are_the_dense_models(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    config, make = WEIGHT_ONLY["gptq, act-order"]
    dense = made.quantize(directory, config, make)
    prompts = [[5, 9, 200, 31], [7] * 9]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(str(directory), skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    reference = Reference(dense)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == reference.greedy(prompt, 24)
