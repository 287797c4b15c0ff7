"""A checkpoint that writes what a test says: a real model for a real server, with a script for each tool it is offered.

The chat template looks at the conversation and ends the prompt with a token that names what comes next. Each of the
script's tokens has a row of its own in the embedding and leads to the next in the head; attention and MLP add nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POSITIONS = 131_072
_START, _END = "<|im_start|>", "<|im_end|>"
_HIDDEN_STEP = 64
_PIECE = 24
"""Characters of a token of a script, or more where a shorter one would not be new."""
_LAST_PIECE = 72
"""Characters of the last one at most. It has 49 at least, wherever the others end: calls, which end alike, differ in
them."""

_TEMPLATE = """
{%- set scripts = SCRIPTS %}
{%- set script = namespace(name='') %}
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\nYou may call functions. Their signatures are within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{%- for name in scripts if not script.name %}
{%- if tools | selectattr('function.name', 'equalto', name) | list %}{%- set script.name = name %}{%- endif %}
{%- endfor %}
{{- '\\n</tools>\\nReturn each call as JSON within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- set done = namespace(calls=0) %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{%- if message.role == 'tool' %}{%- set done.calls = done.calls + 1 %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<|' }}
{%- if script.name %}{{- scripts[script.name][[done.calls, scripts[script.name] | length - 1] | min] }}
{%- else %}{{- 'answer' }}{%- endif %}
{{- '|>' }}
{%- endif %}
"""


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a tool call, as models of Qwen2.5's kind write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_scripted_model(directory: Path, scripts: Mapping[str, Sequence[str]], answer: str) -> Path:
    """Write a Llama checkpoint of one layer that follows scripts, and return its directory.

    Args:
        scripts: By the name of a tool, the first one of them that the request offers: what the model writes first,
            after one tool result, after two, and so on; the last text for all later turns.
        answer: What it writes where no such tool is offered.
    """
    marks: dict[str, str] = {}  # by the text: one that is written in several turns has one
    for name, turns in scripts.items():
        for turn, text in enumerate(turns):
            marks.setdefault(text, f"{name}-{turn}")
    texts = {mark: text for text, mark in marks.items()} | {"answer": answer}
    directory.mkdir(parents=True, exist_ok=True)
    chains, vocab_size = _write_tokenizer(directory, texts)
    _write_weights(directory, chains, vocab_size)
    names = {name: [marks[text] for text in turns] for name, turns in scripts.items()}
    (directory / "chat_template.jinja").write_text(_TEMPLATE.lstrip().replace("SCRIPTS", json.dumps(names)))
    return directory


def _write_tokenizer(directory: Path, texts: Mapping[str, str]) -> tuple[list[list[int]], int]:
    """Returns the chains of tokens, each from the token that names it to the end of the turn, and how many there are.

    The tokenizer knows bytes only; the pieces of scripts are tokens that no text is encoded to.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([_END, _START, *letters])}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chains, starts = [], []
    for name, text in texts.items():
        ((spelled, _),) = spell.pre_tokenize_str(text)
        starts.append(f"<|{name}|>")
        chain = [vocabulary.setdefault(starts[-1], len(vocabulary))]
        while spelled:
            size = _PIECE if len(spelled) > _LAST_PIECE else len(spelled)
            while spelled[:size] in vocabulary and size < len(spelled):
                size += 1
            assert spelled[:size] not in vocabulary, f"the end of {name} is that of another script: vary its words"
            chain.append(vocabulary.setdefault(spelled[:size], len(vocabulary)))
            spelled = spelled[size:]
        chains.append([*chain, vocabulary[_END]])
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END, _START, *starts])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "model_max_length": POSITIONS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return chains, len(vocabulary)


def _write_weights(directory: Path, chains: Sequence[Sequence[int]], vocab_size: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    steps = [step for chain in chains for step in itertools.pairwise(chain)]
    hidden = -(-len(steps) // _HIDDEN_STEP) * _HIDDEN_STEP
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        rows, columns = model.model.embed_tokens.weight, model.lm_head.weight
        for place, (token, following) in enumerate(steps):
            rows[token, place] = 1.0
            columns[following, place] = 4.0  # times the square root of the size, which the norm makes of a 1
    model.generation_config.eos_token_id = 0
    model.to(torch.bfloat16).save_pretrained(directory)
