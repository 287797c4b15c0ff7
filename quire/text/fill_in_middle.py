"""Prompts that ask for the text between two texts, for models that were trained on it.

A format says which special tokens a vocabulary needs, and in which order they go. Knows nothing about requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillInMiddle:
    """The token ids of one format's marks. `prefix` and `suffix` begin the texts before and behind the gap, of which
    the latter may come first. `middle`, if any, begins what the model writes, and a token of `end` ends it, beside the
    model's own end of sequence."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    end: tuple[int, ...]

    def prompt(self, tokenizer: Tokenizer, before: str, behind: str) -> list[int]:
        """The whole prompt. Raises RequestError if a text is not valid Unicode."""
        first = [self.prefix, *tokenizer.encode(before, add_special_tokens=False)]
        second = [self.suffix, *tokenizer.encode(behind, add_special_tokens=False)]
        if self.suffix_first:
            first, second = second, first
        start = [] if tokenizer.bos_id is None or tokenizer.encode("")[:1] != [tokenizer.bos_id] else [tokenizer.bos_id]
        return [*start, *first, *second, *([] if self.middle is None else [self.middle])]


@dataclass(frozen=True)
class _Format:
    prefix: str
    suffix: str
    middle: str | None
    end: tuple[str, ...] = ()
    suffix_first: bool = False


_FORMATS = (
    # Qwen2.5-Coder, CodeGemma: technical report of Qwen2.5-Coder, section 3; CodeGemma's model card
    _Format(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|endoftext|>", "<|file_sep|>", "<|file_separator|>")
    ),
    # StarCoder, StarCoder2, Granite Code: StarCoder's model card
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")),
    # SantaCoder's model card
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>",)),
    # DeepSeek-Coder: README, "Code Insertion"
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    # Code Llama: paper, section 2.3
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # Codestral: mistral-common's encode_fim
    _Format("[PREFIX]", "[SUFFIX]", None, (), suffix_first=True),
)


def fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """The format whose tokens a vocabulary has; None if it has none."""
    for form in _FORMATS:
        marks = [form.prefix, form.suffix, *([form.middle] if form.middle else [])]
        ids = [tokenizer.token_id(mark) for mark in marks]
        if any(number is None for number in ids):
            continue
        prefix, suffix, *middle = (number for number in ids if number is not None)
        end = (tokenizer.token_id(text) for text in form.end)
        return FillInMiddle(
            prefix=prefix,
            suffix=suffix,
            middle=middle[0] if middle else None,
            suffix_first=form.suffix_first,
            end=tuple(number for number in end if number is not None),
        )
    return None
