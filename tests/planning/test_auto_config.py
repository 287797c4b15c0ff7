"""What is chosen when nothing is asked, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import ConfigError, MemoryBudgetError, ModelNotFoundError
from quire.foundation.config import Config
from quire.models.weights import hub
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.planning.footprint import GIB
from quire.planning.machine import Gpu, Machine, this_machine
from tests.checkpoints import edit_config, make_llama, make_tiny
from tests.models.divisible import DIVISIBLE

ROOMY = Machine(memory_bytes=64 * GIB, fast_bfloat16=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", dtype="bfloat16")


def resolve_for(checkpoint: Path, machine: Machine = ROOMY, **settings: object) -> ResolvedConfig:
    return resolve(Config().with_values(model=str(checkpoint), **settings), machine)


def test_everything_open_is_resolved_with_a_reason(checkpoint: Path) -> None:
    resolved = resolve_for(checkpoint)
    config = resolved.config
    assert (config.model.dtype, config.model.max_model_len) == ("bfloat16", 512)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 512)
    assert config.cache.num_gpu_blocks_override == 256 * 512 // 16
    assert config.model.served_model_name == (str(checkpoint),)
    assert len(resolved.reasons) == 7
    assert "the checkpoint's" in resolved.reasons[2]


def test_float32_where_bfloat16_is_slow(checkpoint: Path) -> None:
    resolved = resolve_for(checkpoint, Machine(64 * GIB, fast_bfloat16=False))
    assert resolved.config.model.dtype == "float32"
    assert "no bfloat16" in resolved.reasons[2]


def test_what_is_asked_is_taken(checkpoint: Path) -> None:
    config = resolve_for(
        checkpoint, dtype="float", max_model_len=100, max_num_seqs=3, kv_cache_memory_bytes=10**6, block_size=8
    ).config
    block_bytes = 8 * 2 * 3 * 2 * 16 * 4  # tokens × keys and values × layers × kv heads × head_dim × fp32
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 100)
    assert config.cache.num_gpu_blocks_override == 10**6 // block_bytes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "up to 256 sequences and 512 tokens a step: default"),
        ({"max_num_seqs": 3}, "up to 3 sequences and 512 tokens a step: sequences as asked, tokens by default"),
        (
            {"max_num_batched_tokens": 64},
            "up to 256 sequences and 64 tokens a step: sequences by default, tokens as asked",
        ),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 64}, "up to 3 sequences and 64 tokens a step: as asked"),
    ],
)
def test_each_limit_of_a_step_says_where_it_is_from(settings: dict[str, object], said: str, checkpoint: Path) -> None:
    assert f"batch       {said}" in resolve_for(checkpoint, **settings).reasons


@pytest.mark.parametrize(
    ("settings", "fetched"),
    [
        ({"model": "org/m", "revision": "a"}, [("org/m", "a")]),
        ({"model": "org/m", "revision": "a", "tokenizer_revision": "b"}, [("org/m", "a"), ("org/m", "b")]),
        ({"model": "org/m", "tokenizer": "org/t", "tokenizer_revision": "b"}, [("org/m", None), ("org/t", "b")]),
        ({"model": "org/m", "tokenizer": "org/t", "revision": "a"}, [("org/m", "a"), ("org/t", None)]),
    ],
)
def test_a_tokenizer_has_a_revision_of_its_own(
    settings: dict[str, object], fetched: list[tuple[str, str | None]],
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[tuple[str, str | None]] = []

    def download(model: str, access: hub.HubAccess, patterns: object, flag: str = "") -> Path:
        asked.append((model, access.revision))
        return checkpoint

    monkeypatch.setattr(hub, "download", download)
    resolve(Config().with_values(**settings), ROOMY)
    assert asked == fetched


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("gguf", "--load-format gguf does not suit {}: it has no GGUF file, or leave it out."),
        ("bitsandbytes", "--load-format bitsandbytes does not suit {}: add --quantization bitsandbytes, or leave"),
    ],
)
def test_a_load_format_is_what_the_files_are(form: str, said: str, checkpoint: Path) -> None:
    asked = Config().with_values(model=str(checkpoint), load_format=form)
    with pytest.raises(ConfigError) as caught:
        resolve(asked, ROOMY)
    assert said.format(checkpoint) in caught.value.message
    if form == "bitsandbytes":
        assert resolve(asked.with_values(quantization="bitsandbytes"), ROOMY).spec.quantization is not None


def test_a_head_that_config_json_denies_is_said(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", tie=False)
    assert not any("lm_head" in line for line in resolve_for(directory).reasons)
    edit_config(directory, {"tie_word_embeddings": True})
    assert any(line.startswith("head        lm_head of the files differs") for line in resolve_for(directory).reasons)


# --- devices ---------------------------------------------------------------------------------------------------------

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 79 * GIB)
WITH_GPU = Machine(64 * GIB, fast_bfloat16=True, gpu=H100, why_no_gpu="")
WITH_GPUS = replace(WITH_GPU, gpu=replace(H100, of=3))


def test_a_gpu_is_taken_and_its_worker_measures(checkpoint: Path) -> None:
    resolved = resolve_for(checkpoint, WITH_GPU)
    config = resolved.config
    assert (config.device.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (512, 8192)
    assert config.device.max_cudagraph_capture_size == 512
    assert config.cache.num_gpu_blocks_override is None
    assert "H100" in resolved.reasons[1]
    assert re.match(
        r"kv cache    about [\d,]+ blocks of 16 = [\d,]+ tokens: .* measured at the start", resolved.reasons[5]
    )
    assert "about" not in resolve_for(checkpoint, WITH_GPU, num_gpu_blocks_override=99).reasons[5]


def test_a_gpu_may_be_left_alone_and_graphs_switched_off(checkpoint: Path) -> None:
    assert resolve_for(checkpoint, WITH_GPU, device="cpu").config.device.device == "cpu"
    assert resolve_for(checkpoint, WITH_GPU, enforce_eager=True).config.device.max_cudagraph_capture_size == 0
    assert resolve_for(checkpoint, WITH_GPU, max_cudagraph_capture_size=8).config.device.max_cudagraph_capture_size == 8


def test_a_gpu_that_is_not_there_is_not_promised(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        resolve_for(checkpoint, device="cuda")


@pytest.mark.parametrize("settings", [{}, {"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 10**9}])
def test_the_longest_sequence_that_fits_a_gpu(checkpoint: Path, settings: dict[str, object]) -> None:
    small = replace(H100, memory_bytes=3 * GIB, free_bytes=3 * GIB)
    length = resolve_for(
        checkpoint, replace(WITH_GPU, gpu=small), max_model_len="auto", **settings
    ).config.model.max_model_len
    assert length == 512
    full = replace(small, free_bytes=2**20)
    if not settings:
        with pytest.raises(MemoryBudgetError, match="gpu-memory-utilization"):
            resolve_for(checkpoint, replace(WITH_GPU, gpu=full))


def test_tokens_of_the_kv_cache_are_those_of_all_groups(tmp_path: Path) -> None:
    make_llama(tmp_path, layers=4, tokenizer=False)
    assert "64 blocks of 16 = 1,024 tokens: " in resolve_for(tmp_path, num_gpu_blocks_override=64).reasons[5]
    edit_config(tmp_path, {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32,
        "max_window_layers": 2,
    })  # fmt: skip
    resolved = resolve_for(tmp_path, num_gpu_blocks_override=64, max_num_batched_tokens=64)
    assert len(resolved.spec.kv_groups()) == 2
    # One sequence of 512 tokens takes 32 blocks of one group and 7 of the other.
    assert f"64 blocks of 16 = {64 * 512 // 39:,} tokens: " in resolved.reasons[5]


# --- memory ----------------------------------------------------------------------------------------------------------

PER_TOKEN = 2 * 3 * 2 * 16 * 2  # keys and values × layers × kv heads × head_dim × bf16
SEQUENCE = 512 * PER_TOKEN


def test_a_utilization_is_filled_to_the_last_block(checkpoint: Path) -> None:
    machine = Machine(64 * 2**20, fast_bfloat16=True)
    half = resolve_for(checkpoint, machine, gpu_memory_utilization=0.5)
    whole = resolve_for(checkpoint, machine, gpu_memory_utilization=1)
    for resolved, share in ((half, 0.5), (whole, 1.0)):
        left = share * machine.memory_bytes - resolved.memory.footprint.total
        assert 0 <= left < 16 * PER_TOKEN  # a block
        assert "less weights and activations" in resolved.reasons[5]
    assert blocks_per_sequence(whole) > 2 * blocks_per_sequence(half)


def test_a_memory_that_nobody_asked_for_is_left_by_half(checkpoint: Path) -> None:
    machine = Machine(64 * 2**20, fast_bfloat16=True)
    asked = resolve_for(checkpoint, machine, gpu_memory_utilization=0.9)
    default = resolve_for(checkpoint, machine)
    assert blocks_per_sequence(default) == pytest.approx(blocks_per_sequence(asked) / 2, rel=0.01)
    assert "nothing swaps; --gpu-memory-utilization 0.9" in default.reasons[5]


def test_one_sequence_always_gets_its_room(checkpoint: Path) -> None:
    fixed = resolve_for(checkpoint, max_num_seqs=4, num_gpu_blocks_override=32).memory.footprint.total - SEQUENCE
    machine = Machine(int((fixed + 1.5 * SEQUENCE) / 0.9), fast_bfloat16=True)
    resolved = resolve_for(checkpoint, machine, max_num_seqs=4)
    assert blocks_per_sequence(resolved) == 512 // 16
    assert "one sequence at full length" in resolved.reasons[5]


def test_a_length_that_does_not_fit_is_refused_and_auto_finds_the_longest(checkpoint: Path) -> None:
    fixed = resolve_for(checkpoint, max_num_seqs=4, num_gpu_blocks_override=32).memory.footprint.total - SEQUENCE
    tight = Machine(int((fixed + 0.8 * SEQUENCE) / 0.9), fast_bfloat16=True)
    with pytest.raises(MemoryBudgetError, match=r"--max-model-len auto .*raise --gpu-memory-utilization"):
        resolve_for(checkpoint, tight, max_num_seqs=4)
    by_word = resolve_for(checkpoint, tight, max_num_seqs=4, max_model_len="auto")
    by_number = resolve_for(checkpoint, tight, max_num_seqs=4, max_model_len=-1)
    assert by_word.config == by_number.config
    length = by_word.config.model.max_model_len
    assert isinstance(length, int)
    assert 16 < length <= blocks_per_sequence(by_word) * 16 < 512
    assert resolve_for(checkpoint, tight, max_num_seqs=4, max_model_len=length).config == by_word.config
    assert "the longest that fits, of the model's 512" in by_word.reasons[3]
    assert resolve_for(checkpoint, max_model_len="auto").config.model.max_model_len == 512


def test_auto_takes_the_blocks_that_were_asked_for(checkpoint: Path) -> None:
    assert resolve_for(checkpoint, max_model_len="auto", num_gpu_blocks_override=5).config.model.max_model_len == 80
    given = resolve_for(checkpoint, max_model_len="auto", kv_cache_memory_bytes=3 * 16 * PER_TOKEN + 1)
    assert given.config.model.max_model_len == 48


@pytest.mark.parametrize("machine", [ROOMY, WITH_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("windowed", [False, True], ids=["plain", "windowed"])
@pytest.mark.parametrize("size", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_a_cache_that_holds_no_sequence_of_full_length_is_refused(
    size: str, windowed: bool, machine: Machine, tmp_path: Path
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    make_llama(tmp_path, layers=4, tokenizer=False)
    edit_config(tmp_path, {"architectures": ["Qwen2ForCausalLM"], **(window if windowed else {})})
    settings = {"max_num_batched_tokens": 64, size: 20}
    if size == "kv_cache_memory_bytes":
        settings[size] = 20 * resolve_for(tmp_path, machine, num_gpu_blocks_override=512).spec.kv_block_bytes(
            "float32", 16
        )
    # Twenty blocks: of a plain model's one table, or 13 beside the 7 of the window.
    longest = 16 * (13 if windowed else 20)
    for length in (None, 512, longest + 1):
        flag = size.replace("_", "-")
        said = rf"max seq len \({length or 512} tokens\).* than --{flag} \d+: .*--max-model-len {longest},"
        with pytest.raises(MemoryBudgetError, match=said):
            resolve_for(tmp_path, machine, max_model_len=length, dtype="float32", **settings)
    for length in (longest, "auto", -1):
        config = resolve_for(tmp_path, machine, max_model_len=length, dtype="float32", **settings).config
        assert config.model.max_model_len == longest


def test_no_room_at_all_says_so(checkpoint: Path) -> None:
    for length in (None, "auto"):
        with pytest.raises(MemoryBudgetError, match="are left: give a smaller model"):
            resolve_for(checkpoint, Machine(2**20, fast_bfloat16=True), max_model_len=length)


@pytest.mark.parametrize("machine", [Machine(2**27, fast_bfloat16=True), WITH_GPU])
def test_where_adapters_take_the_memory_the_error_names_their_flags(checkpoint: Path, machine: Machine) -> None:
    with pytest.raises(MemoryBudgetError, match=r"GiB of it for adapters, by --max-loras and --max-lora-rank\)"):
        resolve_for(checkpoint, machine, enable_lora=True, max_loras=1_000_000)


def test_swap_space_is_what_memory_and_sequences_can_use(checkpoint: Path) -> None:
    roomy = resolve_for(checkpoint, swap_space=0.001)
    assert roomy.memory.footprint.swap_space == pytest.approx(0.001 * GIB, rel=0.01)
    assert resolve_for(checkpoint).memory.footprint.swap_space == 256 * SEQUENCE  # of 4 GiB: no more is of any use
    machine = Machine(120 * 2**20, fast_bfloat16=True)
    tight = resolve_for(checkpoint, machine, gpu_memory_utilization=0.9)
    assert tight.memory.footprint.swap_space < (0.9 * machine.memory_bytes - tight.memory.footprint.total) / 2 + 1
    assert "of 4 GiB asked" in tight.reasons[6]
    assert resolve_for(checkpoint, swap_space=0).memory.footprint.swap_space == 0


def test_the_report_adds_up(checkpoint: Path) -> None:
    resolved = resolve_for(checkpoint)
    assert resolved.reasons[6].startswith("memory ")
    for part in ("weights 0.3 MiB", "activations up to", "KV cache 48.0 MiB", "of 64.00 GiB available", "swap space"):
        assert part in resolved.reasons[6], resolved.reasons[6]


def test_ranks_share_the_machine_and_its_model(checkpoint: Path) -> None:
    tight = Machine(200 * 2**20, fast_bfloat16=True)
    one, two = (resolve_for(checkpoint, tight, tensor_parallel_size=size) for size in (1, 2))
    assert two.memory.footprint.total < 100 * 2**20
    assert two.memory.footprint.weights < 0.6 * one.memory.footprint.weights
    assert two.spec == one.spec, "what is said of the model is said of all of it"
    assert any(line.startswith("ranks       2 processes") for line in two.reasons)
    tokens = [r.memory.footprint.kv_cache / (r.memory.num_blocks + 1) for r in (one, two)]
    assert tokens[1] == tokens[0] / 2, "each has one of the two KV heads"


def test_stages_are_planned_by_the_one_that_has_least_room(checkpoint: Path) -> None:
    tight = Machine(200 * 2**20, fast_bfloat16=True)
    whole, two = (resolve_for(checkpoint, tight, pipeline_parallel_size=size) for size in (1, 2))
    assert two.spec == whole.spec
    assert any("2 processes, each with 2 + 1 layers" in line for line in two.reasons), two.reasons
    block = [r.memory.footprint.kv_cache / (r.memory.num_blocks + 1) for r in (whole, two)]
    assert block[1] == block[0] * 2 / 3, "two of three layers"


def test_ranks_have_room_for_the_one_with_most_experts(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **DIVISIBLE["mixtral"] | {"hidden_size": 256, "intermediate_size": 256})
    parts, whole = (
        resolve_for(directory, tensor_parallel_size=4, enable_expert_parallel=whole) for whole in (False, True)
    )
    assert any("but 2 + 1 + 1 + 1 whole experts, and 1/4 of" in line for line in whole.reasons), whole.reasons
    of_experts = 2 * 5 * 3 * 256 * 256 * 4  # in 2 layers
    more = whole.memory.footprint.weights - parts.memory.footprint.weights
    assert more == pytest.approx(of_experts * (2 / 5 - 1 / 4), rel=0.01)


def test_experts_that_ranks_cannot_share_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    mixtral = make_tiny(tmp_path, **DIVISIBLE["mixtral"] | {"num_local_experts": 3})
    with pytest.raises(ConfigError, match="--enable-expert-parallel: LlamaForCausalLM has no experts"):
        resolve_for(checkpoint, tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"over 1, 2 ranks.*each has one of its 3 experts"):
        resolve_for(mixtral, tensor_parallel_size=4, enable_expert_parallel=True)
    resolve_for(mixtral, enable_expert_parallel=True)
    resolve_for(mixtral, WITH_GPUS, tensor_parallel_size=2, enable_expert_parallel=True)


def test_what_ranks_cannot_divide_or_do_not_serve_yet_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3: .* over 1, 2, 4 ranks"):
        resolve_for(checkpoint, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 9: must be from 1 to 3, the number"):
        resolve_for(checkpoint, pipeline_parallel_size=9)
    for name in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name} is not served with --pipeline-parallel-size"):
            resolve_for(checkpoint, pipeline_parallel_size=2, kv_cache_dtype=name)
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="--speculative-config is not supported with --pipeline-parallel-size 2"):
        resolve_for(checkpoint, pipeline_parallel_size=2, speculative_config=ngram)
    assert resolve_for(checkpoint, WITH_GPU, tensor_parallel_size=2, device="cpu").config.device.device == "cpu"


def test_stages_take_gpus_and_more_sequences(checkpoint: Path) -> None:
    """Each step has a part of them."""
    with pytest.raises(
        ConfigError,
        match=r"--tensor-parallel-size 2 and --pipeline-parallel-size 2: each rank takes a GPU, and 3 may be used here",
    ):
        resolve_for(checkpoint, WITH_GPUS, tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2: each rank takes a GPU, and 1 may be used here"):
        resolve_for(checkpoint, WITH_GPU, pipeline_parallel_size=2)
    one, two = (resolve_for(checkpoint, WITH_GPUS, pipeline_parallel_size=size).config for size in (1, 2))
    assert two.scheduler.max_num_seqs == 2 * (one.scheduler.max_num_seqs or 0)
    assert two.scheduler.max_num_batched_tokens == one.scheduler.max_num_batched_tokens
    assert resolve_for(checkpoint, pipeline_parallel_size=2).config.scheduler.max_num_seqs == 256


def test_each_rank_takes_a_gpu(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2: each rank takes a GPU, and 1 may be used here"):
        resolve_for(checkpoint, WITH_GPU, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"--data-parallel-size 2: each engine takes 2 GPUs, and 3 may be used here"):
        resolve(
            Config().with_values(model=str(checkpoint), tensor_parallel_size=2, data_parallel_size=2),
            WITH_GPUS,
            replicas=True,
        )
    one, two = (resolve_for(checkpoint, WITH_GPUS, tensor_parallel_size=size) for size in (1, 2))
    assert two.memory.footprint.weights < 0.6 * one.memory.footprint.weights
    assert any("2 processes, each with 1/2 of every layer, and a GPU" in line for line in two.reasons), two.reasons
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="--speculative-config is not supported on several GPUs"):
        resolve_for(checkpoint, WITH_GPUS, tensor_parallel_size=2, speculative_config=ngram)
    assert resolve_for(checkpoint, WITH_GPUS, tensor_parallel_size=2, enable_lora=True).config.lora.enable_lora


def blocks_per_sequence(resolved: ResolvedConfig) -> int:
    blocks = resolved.config.cache.num_gpu_blocks_override
    assert blocks is not None
    return blocks


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_model_len": 513}, ConfigError, "--max-model-len 513"),
        ({"max_model_len": 1}, ConfigError, "--max-model-len 1"),
        ({"max_num_seqs": 0}, ConfigError, "--max-num-seqs must be at least 1"),
        ({"max_num_batched_tokens": 0}, ConfigError, "--max-num-batched-tokens must be at least 1"),
        ({"long_prefill_token_threshold": -1}, ConfigError, "--long-prefill-token-threshold must be at least 0"),
        ({"swap_space": -0.5}, ConfigError, "--swap-space must be at least 0"),
        ({"swap_space": float("inf")}, ConfigError, "--swap-space must be at least 0, and finite"),
        ({"swap_space": float("nan")}, ConfigError, "swap_space: nan is not a number"),
        ({"num_gpu_blocks_override": 0}, ConfigError, "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 5}, MemoryBudgetError, "raise it"),
        ({"gpu_memory_utilization": 0}, ConfigError, "--gpu-memory-utilization 0 is no share"),
        ({"gpu_memory_utilization": 1.01}, ConfigError, "at most 1"),
        ({"gpu_memory_utilization": float("nan")}, ConfigError, "nan is not a number"),
        ({"tokenizer": "/no/such/tokenizer"}, ModelNotFoundError, "/no/such/tokenizer"),
    ],
)
@pytest.mark.parametrize("machine", [ROOMY, WITH_GPU], ids=["cpu", "gpu"])
def test_what_cannot_be_meant_is_refused_by_name(
    checkpoint: Path, machine: Machine, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_for(checkpoint, machine, **settings)


def test_this_machine_has_memory() -> None:
    assert this_machine().memory_bytes > 2**28


# --- several engines -------------------------------------------------------------------------------------------------


def test_engines_divide_a_cpus_memory_and_say_so(checkpoint: Path) -> None:
    tight = Machine(memory_bytes=80 * 2**20, fast_bfloat16=True)
    one = resolve_for(checkpoint, tight, max_num_seqs=256).memory.num_blocks
    config = Config().with_values(model=str(checkpoint), data_parallel_size=2, max_num_seqs=256)
    two = resolve(config, tight, replicas=True)
    assert two.memory.num_blocks < 0.6 * one
    assert any("2 behind one address" in reason for reason in two.reasons)


@pytest.mark.parametrize(
    ("engines", "machine", "why"),
    [
        (0, ROOMY, "at least 1"),
        (65, ROOMY, "at most 64"),
        (2, WITH_GPU, "each engine takes a GPU, and 1 may be used here"),
    ],
)
def test_more_engines_than_there_can_be_are_refused(checkpoint: Path, engines: int, machine: Machine, why: str) -> None:
    config = Config().with_values(model=str(checkpoint), data_parallel_size=engines)
    with pytest.raises(ConfigError, match=why) as refused:
        resolve(config, machine, replicas=True)
    assert refused.value.param == "data_parallel_size"


def test_engines_take_a_gpu_each(checkpoint: Path) -> None:
    machine = replace(WITH_GPU, gpu=replace(H100, of=4))
    config = Config().with_values(model=str(checkpoint), data_parallel_size=4)
    resolved = resolve(config, machine, replicas=True)
    assert any("each on a GPU" in reason for reason in resolved.reasons)


def test_only_a_server_has_several_engines(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="only quire serve runs several engines"):
        resolve_for(checkpoint, data_parallel_size=2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 256, "intermediate_size": 256}
    return make_tiny(tmp_path_factory.mktemp("mixture"), **DIVISIBLE["mixtral"] | wide)


def resolve_group(mixture: Path, machine: Machine = ROOMY, **settings: object) -> ResolvedConfig:
    config = Config().with_values(model=str(mixture), enable_expert_parallel=True, data_parallel_size=2, **settings)
    return resolve(config, machine, replicas=True)


def test_engines_that_divide_experts_have_room_for_theirs_and_for_the_tokens_of_all(mixture: Path) -> None:
    config = Config().with_values(model=str(mixture), data_parallel_size=2)
    each, divided = resolve(config, ROOMY, replicas=True), resolve_group(mixture)
    assert any(
        "1 process with every layer, but 3 + 2 whole experts over all engines; sizes" in line
        for line in divided.reasons
    ), divided.reasons
    own, all_ = divided.memory.footprint, each.memory.footprint
    of_experts = 2 * 5 * 3 * 256 * 256 * 4  # in 2 layers
    assert all_.weights - own.weights == pytest.approx(of_experts * 2 / 5, rel=0.01)
    assert own.activations > all_.activations + 512 * (2 * 256 + 256) * 4, "rows of both, and sums of its own"
    two = resolve_group(mixture, tensor_parallel_size=2)
    assert any("but 2 + 1 + 1 + 1 whole experts over all engines, and 1/2 of" in line for line in two.reasons)


@pytest.mark.parametrize(
    ("settings", "machine", "message", "param"),
    [
        ({}, WITH_GPUS, "is not served on GPUs yet. Leave one of them out, or give --device cpu", "enable_expert_"),
        ({"tensor_parallel_size": 4}, ROOMY, "8 ranks in all would divide 5 experts", "data_parallel_size"),
        ({"pipeline_parallel_size": 2}, ROOMY, "not served with --pipeline-parallel-size yet", "pipeline_"),
        ({"kv_cache_dtype": "fp8"}, ROOMY, "not served with --kv-cache-dtype yet", "kv_cache_dtype"),
        ({"enable_lora": True}, ROOMY, "not served with --enable-lora yet", "enable_lora"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            ROOMY,
            "not served with --speculative-config yet",
            "speculative_config",
        ),
        ({"nnodes": 2}, ROOMY, "--nnodes 2 with --pipeline-parallel-size 1", "nnodes"),
    ],
)
def test_what_engines_that_divide_experts_do_not_serve_is_refused(
    mixture: Path, settings: dict[str, object], machine: Machine, message: str, param: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve_group(mixture, machine, **settings)
    assert (refused.value.param or "").startswith(param)
