"""How a byte-pair tokenizer cuts texts: what tokenizer.json has for the value of `tokenizer.ggml.pre`.

Source: the tokenizer.json files of the models that each name stands for in llama.cpp's convert_hf_to_gguf_update.py,
and the expressions of its llama-vocab.cpp.
An unknown name is refused, because a guess would give other tokens than the model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
_ANY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
_GPT4O = rf"{_ANY_CASE}|\p{{N}}{{1,3}}|{_SLASHED}"


@dataclass(frozen=True)
class PreTokenizer:
    """How texts are cut: `pre_tokenizer` and `normalizer` of tokenizer.json.

    Attributes:
        whole_words: Whether a word that is a token is taken whole, without merges (`ignore_merges`).
        adds_bos: Whether texts begin with the beginning-of-sequence token, if the file does not say it.
    """

    steps: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    whole_words: bool = False
    adds_bos: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _in_turn(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _in_turn(words, _byte_level(use_regex=False))


def _runs(*patterns: str) -> dict[str, Any]:
    return _in_turn(*(_split(pattern)["pretokenizers"][0] for pattern in patterns), _byte_level(use_regex=False))


_HAN_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3 = _runs(
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS = _in_turn({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
_LLAMA3 = PreTokenizer(_split(_GPT4), whole_words=True, adds_bos=True)
_GPT2 = PreTokenizer(_byte_level(use_regex=True))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_split(_GPT4)),
    "dbrx": PreTokenizer(_split(_GPT4)),
    "gpt-4o": PreTokenizer(_split(_GPT4O)),
    "qwen2": PreTokenizer(_split(_QWEN2), normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": PreTokenizer(_split(_QWEN2), normalizer={"type": "NFC"}),
    "tekken": PreTokenizer(_split(_TEKKEN), whole_words=True, adds_bos=True),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": PreTokenizer(_DIGITS),
    "starcoder": PreTokenizer(_DIGITS),
    "command-r": PreTokenizer(_DIGITS, normalizer={"type": "NFC"}),
    "glm4": PreTokenizer(_split(_GPT4)),
    "chatglm-bpe": PreTokenizer(_split(_GPT4)),
    "minimax-m2": PreTokenizer(_split(_GPT4O)),
    "stablelm2": PreTokenizer(_split(_QWEN2)),
    "hunyuan": PreTokenizer(_split(_QWEN2)),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
}


def pre_tokenizer_of(name: object) -> PreTokenizer:
    """Return what a value of `tokenizer.ggml.pre` stands for. Raises CheckpointError if the value is not known."""
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    raise CheckpointError(
        f"The GGUF file's 'tokenizer.ggml.pre' is {name!r}, which is not supported: served are "
        f"{', '.join(PRE_TOKENIZERS)}. Give --tokenizer the directory or hub id of the model's own tokenizer.",
        param="tokenizer",
    )
