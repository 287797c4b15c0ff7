"""LoRA beside PEFT: equal tokens and log probabilities, for many adapters in one batch."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, AsyncLLM, BeamSearchParams, LLMEngine, LoRARequest, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.foundation.messages.from_engine import Deltas, Done, FromEngine
from quire.foundation.messages.to_engine import Adapter, Add, Control
from tests.adapters import ALL, Reference, make_adapter
from tests.checkpoints import make_llama, make_tiny
from tests.gguf.made import make_gguf

ATTENTION, MLP = ALL[:4], ALL[4:]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "attention": {"rank": 4, "modules": ATTENTION, "use_dora": True},
    "mlp": {"rank": 64, "modules": MLP},
    "q and v": {"rank": 16, "modules": ("q_proj", "v_proj"), "use_rslora": True},
    "down": {"rank": 5, "modules": ("down_proj",), "lora_alpha": 40, "use_dora": True},
    "some layers": {"rank": 32, "layers_to_transform": [1]},
    "patterns": {"rank": 8, "rank_pattern": {"q_proj": 24}, "alpha_pattern": {"up_proj": 3}},
    "gate": {"rank": 48, "modules": ("gate_proj", "k_proj")},
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "enable_lora": True, "max_lora_rank": 64, "num_gpu_blocks_override": 400,
    "skip_tokenizer_init": True,
}  # fmt: skip


class Stage:
    """A model with adapters, and PEFT's of the same. `start`: with an engine of it, `llm`."""

    llm: LLM

    def __init__(
        self, directory: Path, model: Path, kinds: dict[str, dict[str, Any]], *, start: bool = True, **settings: Any
    ) -> None:
        self.model = model
        self.paths = {
            name: make_adapter(directory / name, model, seed=seed, **kind)
            for seed, (name, kind) in enumerate(kinds.items())
        }
        self.reference = Reference(model, self.paths)
        self._greedy: dict[tuple[Any, ...], list[int]] = {}
        if not start:
            return
        self.llm = LLM(str(model), **(SETTINGS | {"max_loras": len(kinds)} | settings))

    def greedy(self, prompt: list[int], name: str | None, count: int) -> list[int]:
        """PEFT's tokens, computed once."""
        asked = (*prompt, name, count)
        if asked not in self._greedy:
            self._greedy[asked] = self.reference.greedy(prompt, name, count)
        return self._greedy[asked]

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1 + list(self.paths).index(name), str(self.paths[name]))

    def generate(
        self, prompts: list[list[int]], names: list[str | None], llm: LLM | None = None, **sampling: Any
    ) -> list[Any]:
        params = SamplingParams(**({"detokenize": False, **GREEDY} | sampling))
        wanted: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return (llm or self.llm).generate(
            wanted, params, use_tqdm=False, lora_request=[self.request(name) for name in names]
        )

    def check(self, prompts: list[list[int]], names: list[str | None], count: int, llm: LLM | None = None) -> None:
        """Greedy tokens are PEFT's."""
        for prompt, name, output in zip(
            prompts, names, self.generate(prompts, names, llm, max_tokens=count), strict=True
        ):
            assert list(output.outputs[0].token_ids) == self.greedy(prompt, name, count), name


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("lora")
    stage = Stage(directory, make_llama(directory / "model", tokenizer=False), KINDS)
    yield stage
    stage.llm.close()


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    luck = random.Random(seed)
    return [[luck.randrange(3, 300) for _ in range(length)] for length in lengths]


def test_eight_adapters_and_the_base_model_in_one_batch(stage: Stage) -> None:
    names = [*KINDS, None, "all", None, "mlp"]
    stage.check(random_prompts(1, [5, 9, 17, 33, 8, 21, 12, 40, 6, 11, 30, 3]), names, 64)


def test_log_probabilities_are_pefts(stage: Stage) -> None:
    """Of every prompt token, which are computed in chunks and in steps that others share."""
    names = [*KINDS, None]
    prompts = random_prompts(2, [24 + number for number in range(len(names))])
    for prompt, name, output in zip(
        prompts, names, stage.generate(prompts, names, max_tokens=1, prompt_logprobs=3), strict=True
    ):
        expected = stage.reference.logits(prompt, name).log_softmax(-1)
        for at, reported in enumerate(output.prompt_logprobs[1:], 1):
            for token, found in reported.items():
                assert abs(found.logprob - float(expected[at - 1, token])) < 1e-4, (name, at)


def test_equal_prompts_find_the_cache_of_their_own_adapter(stage: Stage) -> None:
    (prompt,) = random_prompts(3, [50])
    names = ["all", "mlp", None]
    cold = stage.generate([prompt] * 3, names, max_tokens=8)
    warm = stage.generate([prompt] * 3, names, max_tokens=8)
    assert [output.num_cached_tokens for output in (*cold, *warm)] == [0, 0, 0, 48, 48, 48]
    for before, after in zip(cold, warm, strict=True):
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
    assert len({tuple(output.outputs[0].token_ids) for output in cold}) == 3


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_chunks_preemption_and_too_few_slots_change_nothing(stage: Stage, swap_space: float) -> None:
    """Adapters come and go while others run: two slots for eight, and blocks for a few sequences only."""
    names = [*KINDS, None, *KINDS]
    prompts = random_prompts(4, [19, 40, 7, 25, 33, 12, 28, 9, 31, 22, 16, 37, 5, 26, 14, 30, 11])
    with LLM(
        str(stage.llm._config.model.model), dtype="float32", device="cpu", enable_lora=True, max_loras=2,
        max_lora_rank=64, max_cpu_loras=3, skip_tokenizer_init=True, num_gpu_blocks_override=7, max_num_seqs=6,
        max_num_batched_tokens=16, max_model_len=96, swap_space=swap_space,
    ) as llm:  # fmt: skip
        stage.check(prompts, names, 20, llm)
        stage.check(prompts[:4], names[:4], 20, llm)
        counts = llm._local.client.counts()
        assert counts["preemptions"]
        assert counts["free_blocks"] == counts["blocks"]


def test_adapters_are_replaced_amid_load(stage: Stage, tmp_path: Path) -> None:
    replace_amid_load(stage, stage.llm, tmp_path)


def replace_amid_load(stage: Stage, llm: LLM, tmp_path: Path) -> None:
    """Requests go on with what they began with, and those that come after it have what was loaded then."""
    client, contents = llm._local.client, list(stage.paths)
    prompts = random_prompts(9, [11, 30, 21, 8])
    adapters: list[Adapter] = []
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()

    def take() -> FromEngine | None:
        message = client.receive(0.0)
        if isinstance(message, Deltas):
            at = 0
            for number, count in zip(message.ids, message.counts, strict=True):
                tokens.setdefault(number, []).extend(message.tokens[at : at + count])
                at += count
            ended.update(end.id for end in message.ends)
        return message

    for number, name in enumerate(contents):
        shutil.rmtree(tmp_path / "hot", ignore_errors=True)
        shutil.copytree(stage.paths[name], tmp_path / "hot")
        client.send(Control(number, "load_adapter", {"name": "hot", "path": str(tmp_path / "hot")}))
        while not isinstance(done := take(), Done):
            pass
        adapters.append(Adapter(**done.value))
        for each in range(4):
            prompt, params = prompts[each], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            own = 1_000 + 4 * number + each
            client.send(Add(own, prompt, len(prompt), params, [], own, 0.0, adapter=adapters[-1]))
        for _ in range(3):
            take()
    assert ended != set(range(1_000, 1_000 + 4 * len(contents)))
    deadline = time.monotonic() + 120  # steps that wait for files end at once, so their number says nothing
    while len(ended) < 4 * len(contents) and time.monotonic() < deadline:
        take()
    assert len({adapter.digest for adapter in adapters}) == len(contents)
    for own, found in tokens.items():
        name, prompt = contents[(own - 1_000) // 4], prompts[own % 4]
        assert found == stage.greedy(prompt, name, 12), name


def test_streams_have_adapters(stage: Stage, tmp_path: Path) -> None:
    """One that is asked for twice at once is read once; one that cannot be read fails alone, until it can."""
    names = [*KINDS, None, "all", "mlp"]
    prompts = random_prompts(6, [12 + number for number in range(len(names))])
    params = SamplingParams(**GREEDY, max_tokens=16, detokenize=False)
    late = LoRARequest("late", 1, str(tmp_path / "late"))

    async def tokens(llm: AsyncLLM, prompt: list[int], adapter: LoRARequest | None) -> list[int]:
        stream = llm.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)
        return list([output async for output in stream][-1].outputs[0].token_ids)

    async def run(llm: AsyncLLM) -> None:
        loads: list[str] = []
        send = llm._local.client.send

        def counted(message: Any) -> None:
            loads.extend([message.value["name"]] if isinstance(message, Control) and message.value else [])
            send(message)

        llm._local.client.send = counted  # type: ignore[method-assign]
        wanted = [tokens(llm, *each) for each in zip(prompts, map(stage.request, names), strict=True)]
        *found, missing = await asyncio.gather(*wanted, tokens(llm, prompts[0], late), return_exceptions=True)
        for prompt, name, own in zip(prompts, names, found, strict=True):
            assert own == stage.greedy(prompt, name, 16), name
        assert isinstance(missing, RequestError)
        shutil.copytree(stage.paths["gate"], tmp_path / "late")
        assert await tokens(llm, prompts[0], late) == stage.greedy(prompts[0], "gate", 16)
        assert sorted(loads) == sorted([*KINDS, "late", "late"])
        assert await llm.list_loras() == set(range(1, len(KINDS) + 1))
        assert [await llm.remove_lora(number) for number in (4, 99)] == [True, False]
        assert 4 not in await llm.list_loras()
        assert await llm.add_lora(LoRARequest("again", 4, str(stage.paths["q and v"])))
        assert 4 in await llm.list_loras()

    llm = AsyncLLM(str(stage.model), **(SETTINGS | {"max_loras": len(KINDS)}))
    try:
        asyncio.run(run(llm))
    finally:
        llm.shutdown()


def test_requests_between_steps_have_adapters(stage: Stage) -> None:
    """The first ones go on while the adapter of the next is read, and may end then."""
    names = ["all", "mlp", None, "down"]
    prompts = random_prompts(10, [12, 9, 15, 20])
    engine, last = LLMEngine(str(stage.model), **(SETTINGS | {"max_loras": 2})), {}
    try:
        for name, prompt in zip(names, prompts, strict=True):
            params = SamplingParams(**GREEDY, max_tokens=6 if name == "mlp" else 24, detokenize=False)
            wanted: Any = {"prompt_token_ids": prompt}
            engine.add_request(str(name), wanted, params, lora_request=stage.request(name))
            last |= {output.request_id: output for output in engine.step()}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
        for name, prompt in zip(names, prompts, strict=True):
            found = list(last[str(name)].outputs[0].token_ids)
            assert found == stage.greedy(prompt, name, 24)[: 6 if name == "mlp" else 24], name
    finally:
        engine.close()


@pytest.mark.parametrize("limit", [None, 1])
def test_a_beam_of_one_is_greedy_with_each_prompts_adapter(stage: Stage, limit: int | None) -> None:
    names, prompts = ["all", None, "mlp"], random_prompts(11, [10, 14, 8])
    wanted: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = BeamSearchParams(beam_width=1, max_tokens=10, ignore_eos=True)
    adapters = [stage.request(name) for name in names]
    found = stage.llm.beam_search(wanted, params, lora_request=adapters, concurrency_limit=limit)
    for name, prompt, output in zip(names, prompts, found, strict=True):
        assert output.sequences[0].tokens[len(prompt) :] == stage.greedy(prompt, name, 10), name


def test_several_sequences_and_sampling_have_the_adapter_too(stage: Stage) -> None:
    (prompt,) = random_prompts(5, [20])
    how = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 8}
    first, other, again = (stage.generate([prompt], [name], **how)[0].outputs for name in ("all", None, "all"))
    assert [each.token_ids for each in first] == [each.token_ids for each in again]
    assert [each.token_ids for each in first] != [each.token_ids for each in other]


def test_what_does_not_serve_is_refused_before_anything_runs(stage: Stage, tmp_path: Path) -> None:
    model = Path(stage.llm._config.model.model)
    wide = make_llama(tmp_path / "wide", hidden=32, tokenizer=False)
    for path, word in (
        (make_adapter(tmp_path / "a", model, rank=65), "--max-lora-rank 64"),
        (make_adapter(tmp_path / "b", wide), "is it an adapter of this model"),
        (make_adapter(tmp_path / "d", model, modules_to_save=["lm_head"]), "modules_to_save"),
        (make_adapter(tmp_path / "e", model, bias="all"), "bias"),
        (make_adapter(tmp_path / "f", model, modules=("q_proj", "lm_head")), "lm_head"),
        (make_adapter(tmp_path / "g", model, modules=("embed_tokens",)), "embed_tokens"),
        (tmp_path / "nowhere", "adapter_config.json"),
        ("s3://bucket", "write s3://bucket/key"),
    ):
        with pytest.raises(RequestError) as refused:
            stage.llm.generate("x", lora_request=LoRARequest("wrong", 1, str(path)), use_tqdm=False)
        assert word in refused.value.message
    stage.check(random_prompts(6, [10]), ["all"], 4)


GROUPED: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
"""Queries that lie beside their keys and values in one projection."""
GATED: dict[str, Any] = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                         "shared_expert_intermediate_size": 24, "sliding_window": 13,
                         "layer_types": ["full_attention", "sliding_attention"]}  # fmt: skip
"""A gate of attention's output that lies behind the values in one product."""


@pytest.mark.parametrize(
    ("architecture", "config", "modules"),
    [
        ("GPT2LMHeadModel", {"n_embd": 48, "n_layer": 2, "n_head": 4}, ("c_attn", "c_proj", "c_fc")),
        ("Phi3ForCausalLM", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("Qwen3ForCausalLM", {"head_dim": 16}, ALL),
        ("Gemma2ForCausalLM", {"head_dim": 16}, ALL),
        ("FalconForCausalLM", GROUPED, ("query_key_value", "dense", "dense_h_to_4h")),
        ("LagunaForCausalLM", GATED, ("g_proj", "q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_other_families(tmp_path: Path, architecture: str, config: dict[str, Any], modules: tuple[str, ...]) -> None:
    model = make_tiny(tmp_path / "model", architecture, **config)
    kinds = {
        "a": {"rank": 8, "modules": modules},
        "b": {"rank": 16, "modules": modules[:1]},
        "c": {"rank": 4, "modules": modules, "use_dora": True, "use_rslora": True},
    }
    stage = Stage(tmp_path, model, kinds)
    stage.check(random_prompts(7, [9, 21, 14, 17]), ["a", None, "b", "c"], 12)
    stage.llm.close()


def test_adapters_change_a_quantized_model_as_they_change_a_whole_one(stage: Stage) -> None:
    """The base product is the scheme's own; beside it, adapters add what they add anywhere. DoRA's norms are those of
    the weights in the files.
    """
    (prompt,) = random_prompts(8, [40])
    with LLM(
        str(stage.llm._config.model.model), dtype="float32", device="cpu", enable_lora=True, max_loras=2,
        max_lora_rank=64, skip_tokenizer_init=True, num_gpu_blocks_override=64, quantization="fp8",
    ) as llm:  # fmt: skip
        names = ["all", "attention", None]
        outputs = stage.generate([prompt] * 3, names, llm, max_tokens=1, prompt_logprobs=1)
    errors = {}
    for name, output in zip(names, outputs, strict=True):
        found = torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])
        for other in names:
            expected = stage.reference.logits(prompt, other).log_softmax(-1)
            own = torch.tensor([float(expected[at, token]) for at, token in enumerate(prompt[1:])])
            errors[name, other] = float((found - own).abs().median())
    for name in names[:2]:
        assert errors[name, name] < 2 * errors[None, None]
        assert errors[name, None] > 2 * errors[name, name]


def test_adapters_change_a_gguf_file_as_they_change_its_weights_dense(tmp_path: Path) -> None:
    """With DoRA, whose norms are of the weights that blocks stand for."""
    dense = make_llama(tmp_path / "dense", hidden=64)
    file = make_gguf(dense, tmp_path / "file" / "model-Q8_0.gguf", "Q8_0", random=False)
    kinds = {name: KINDS[name] for name in ("all", "attention", "down")}
    stage = Stage(tmp_path, dense, kinds)
    with LLM(
        str(file), dtype="float32", device="cpu", enable_lora=True, max_loras=3, max_lora_rank=8,
        skip_tokenizer_init=True, num_gpu_blocks_override=64,
    ) as llm:  # fmt: skip
        stage.check(random_prompts(10, [9, 21, 14, 17]), [*kinds, None], 12, llm)
    stage.llm.close()


def test_settings_that_contradict_each_other_are_refused(stage: Stage) -> None:
    model = str(stage.llm._config.model.model)
    for settings, word in (
        ({"lora_modules": ("a=x",)}, "--enable-lora"),
        ({"enable_lora": True, "max_loras": 0}, "--max-loras"),
        ({"enable_lora": True, "max_lora_rank": 257}, "--max-lora-rank"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras"),
        ({"enable_lora": True, "lora_modules": ("a=x",), "lora_pinned": ("a", "b")}, "--lora-pinned"),
        ({"enable_lora": True, "lora_modules": (f"{model}=x",)}, "base model's name"),
        ({"enable_lora": True, "lora_dir": "nowhere"}, "--lora-dir nowhere is no directory"),
    ):
        with pytest.raises(ConfigError, match=word):
            LLM(model, **settings)
    with pytest.raises(RequestError, match="2 prompts need one lora_request"):
        stage.llm.generate(["a", "b"], lora_request=[None])
    for wrong in ("a", ["a"], {"lora_name": "a"}):
        with pytest.raises(RequestError, match="lora_request must be a LoRARequest, or a list of one"):
            stage.llm.generate(["a"], lora_request=wrong)
    with pytest.raises(RequestError, match="lora_int_id"):
        LoRARequest("a", 0, "x")
