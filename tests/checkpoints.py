"""Tiny real checkpoints, made by `transformers` in the test that needs one: the reference of everything numeric.

`make_llama(tmp_path / "model")` writes a directory as published on the hub: config.json, safetensors, generation
config, tokenizer and chat template. Weights are seeded and wide (std 0.2), so greedy text wanders and does not repeat;
norm weights and biases are random as well, so that leaving one out shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
VOCAB_SIZE = 320

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = [
    "the quick brown fox jumps over the lazy dog and the other foxes sleep in the tall grass",
    "one two three four five six seven eight nine ten eleven twelve",
    "Hello, how are you? I am fine, thank you. What is your name? My name is Quill.",
    "Paris is the capital of France. The answer is 42. naïve café Ünïcödé 你好 世界 🙂",
]


def make_llama(
    directory: Path | str,
    *,
    hidden: int = 64,
    intermediate: int = 112,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    max_len: int = 512,
    tie: bool = False,
    rope: Literal["default", "llama3"] | dict[str, Any] = "default",
    attention_bias: bool = False,
    mlp_bias: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: str | None = None,
    generation: Literal[4, 5] = 5,
    tokenizer: bool = True,
    eos: int | list[int] = IM_END_ID,
    std: float = 0.2,
    seed: int = 0,
) -> Path:
    """Write a tiny Llama checkpoint and return its directory.

    Args:
        directory: Created if missing.
        head_dim: Default hidden / heads.
        vocab_size: At least VOCAB_SIZE when a tokenizer is written.
        rope: "default", "llama3" (LLAMA3_ROPE), or the parameters themselves.
        shards: Largest shard ("40KB"): several files and an index. Default: one file.
        generation: Which generation of transformers the files look like: 4 writes `rope_theta`, `rope_scaling`,
            `torch_dtype` and the chat template inside tokenizer_config.json; 5 writes `rope_parameters`, `dtype` and
            chat_template.jinja.
        tokenizer: Write a byte-level BPE tokenizer with ChatML.
        eos: End-of-sequence token or tokens, in config.json and generation_config.json.
        std: Spread of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    parameters = {"default": {"rope_type": "default", "rope_theta": 10000.0}, "llama3": LLAMA3_ROPE}
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        tie_word_embeddings=tie,
        rope_parameters=dict(parameters[rope] if isinstance(rope, str) else rope),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.normal_(mean, std, generator=generator)
    model.generation_config.bos_token_id = END_OF_TEXT_ID
    model.generation_config.eos_token_id = eos
    model.to(getattr(torch, dtype)).save_pretrained(path, **({"max_shard_size": shards} if shards else {}))
    if generation == 4:
        edit_config(path, _as_published_by_4)
    if tokenizer:
        write_tokenizer(path, template_inside=generation == 4)
    return path


def make_tiny(
    directory: Path | str,
    architecture: str,
    *,
    generation: Literal[4, 5] = 5,
    shards: str | None = None,
    seed: int = 0,
    std: float = 0.2,
    **config: Any,
) -> Path:
    """Write a tiny checkpoint of any architecture that transformers has, without a tokenizer.

    Args:
        architecture: transformers' class: MistralForCausalLM, GPT2LMHeadModel, …
        generation, shards, std: See make_llama.
        config: What differs from TINY.
    """
    import torch
    import transformers

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**TINY | config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = bool((parameter == 1.0).all())  # those that are stored less one are 0
            parameter.normal_(1.0 if is_norm else 0.0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, std, generator=generator)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, std, generator=generator)
    model.save_pretrained(path, **({"max_shard_size": shards} if shards else {}))
    if generation == 4:
        edit_config(path, _as_published_by_4)
    return path


def edit_config(directory: Path, edit: dict[str, Any] | Callable[[dict[str, Any]], None]) -> None:
    """Rewrite config.json: `edit` is a dict of changed keys, or a function that changes the loaded dict in place."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    edit(config) if callable(edit) else config.update(edit)
    file.write_text(json.dumps(config, indent=2))


def write_tokenizer(directory: Path, *, template_inside: bool = False) -> None:
    """A byte-level BPE of at most VOCAB_SIZE tokens with the ChatML specials as ids 0 to 2, and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if template_inside:
        config["chat_template"] = CHATML
    else:
        (directory / "chat_template.jinja").write_text(CHATML)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _as_published_by_4(config: dict[str, Any]) -> None:
    rope = dict(config.pop("rope_parameters", None) or {})
    if "sliding_attention" in rope:  # Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        del config["layer_types"]
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.48.0"
