"""Quill's tokenizer: a byte-level BPE with single digits, the special tokens and the chat template.

Owns training and the files of the Hugging Face layout that concern text. Knows nothing about the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from quill.chat import BEGIN, END, END_OF_TEXT, TOOLS_CLOSING, TOOLS_OPENING

VOCABULARY = 4096
CONTEXT = 2048
SPECIAL_TOKENS = (END_OF_TEXT, BEGIN, END)

# Words with the one character before them, digits one by one (so that a number's places are tokens), signs, spaces.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _quoted(text: str) -> str:
    """As a jinja string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


# Says what chat.render and chat.system_with_tools say. A tool's result is a user turn; results in a row share one.
CHAT_TEMPLATE = f"""
{{%- if tools %}}
    {{{{- "{BEGIN}system\\n" }}}}
    {{%- if messages[0].role == "system" %}}
        {{{{- messages[0].content + "\\n\\n" }}}}
    {{%- endif %}}
    {{{{- {_quoted(TOOLS_OPENING)} }}}}
    {{%- for tool in tools %}}
        {{{{- "\\n" + (tool | tojson) }}}}
    {{%- endfor %}}
    {{{{- {_quoted(TOOLS_CLOSING)} + "{END}\\n" }}}}
{{%- elif messages[0].role == "system" %}}
    {{{{- "{BEGIN}system\\n" + messages[0].content + "{END}\\n" }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{%- if message.role == "user" or (message.role == "system" and not loop.first) %}}
        {{{{- "{BEGIN}" + message.role + "\\n" + message.content + "{END}\\n" }}}}
    {{%- elif message.role == "assistant" %}}
        {{{{- "{BEGIN}assistant\\n" + (message.content or "") }}}}
        {{%- for call in message.tool_calls or [] %}}
            {{%- set function = call.function or call %}}
            {{%- if not loop.first or message.content %}}
                {{{{- "\\n" }}}}
            {{%- endif %}}
            {{{{- '<tool_call>\\n{{"name": "' + function.name + '", "arguments": ' }}}}
            {{{{- function.arguments if function.arguments is string else function.arguments | tojson }}}}
            {{{{- "}}\\n</tool_call>" }}}}
        {{%- endfor %}}
        {{{{- "{END}\\n" }}}}
    {{%- elif message.role == "tool" %}}
        {{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}}
            {{{{- "{BEGIN}user" }}}}
        {{%- endif %}}
        {{{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}}}
        {{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}}
            {{{{- "{END}\\n" }}}}
        {{%- endif %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- "{BEGIN}assistant\\n" }}}}
{{%- endif %}}
""".strip()


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_PIECES), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return number


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Everything of the Hugging Face layout that is about text, with the sampling defaults."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    ids = {token: special_id(tokenizer, token) for token in SPECIAL_TOKENS}
    roles = {"eos_token": END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(ids[token]): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        **roles,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "eos_token_id": [ids[END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
    }
    for name, content in (
        ("tokenizer_config", config),
        ("special_tokens_map", roles),
        ("generation_config", generation),
    ):
        (directory / f"{name}.json").write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
