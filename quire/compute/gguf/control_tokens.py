"""Tokens that are known by their text to control a model, whatever type a GGUF file says they are of.

Converters wrote the types of tokens that a fine-tune added as they found them, often as those of ordinary text. Source:
llama.cpp's llama-vocab.cpp, which knows these tokens by their text, too.
"""

from __future__ import annotations

from collections.abc import Collection

_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3, Granite
    "<|im_end|>", "<|endoftext|>",  # ChatML, Qwen, GPT-2
    "<|end|>", "<|return|>", "<|call|>",  # Phi-3, Harmony
    "<|calls|>", "<|flush|>",  # Solar
    "<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>",  # Gemma
    "</s>", "<EOT>", "_<EOT>",  # Llama 2, CodeLlama
    "[EOT]", "[EOS]",  # Kimi
    "<end_of_utterance>",  # SmolVLM
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",  # what follows a middle that is filled in
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
FILL_IN_MIDDLE = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>", "<|middle|>",
})  # fmt: skip
"""Tokens around the parts of a text whose middle is asked for."""
_WITHIN_TURNS: dict[str, tuple[frozenset[str], ...]] = {
    "<|end|>": (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|flush|>", "<|calls|>"})),
}
"""Tokens that end a part of a turn where a vocabulary has all of these beside them."""


def end_texts(tokens: Collection[object]) -> frozenset[str]:
    """The texts that end a turn or a sequence, in a vocabulary of these tokens."""
    found = _ENDS.intersection(token for token in tokens if isinstance(token, str))
    parts = {text for text, sets in _WITHIN_TURNS.items() if any(others <= found for others in sets)}
    return found - parts
