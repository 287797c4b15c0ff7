"""Pairs of a query and a document as the token ids that a cross-encoder reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.errors import ContextLengthError
from quire.foundation.messages.from_engine import PoolingInfo
from quire.serving.api.pooling.inputs import Cut, PooledText, named_place
from quire.serving.api.request_work import TimeSlice, check_total
from quire.serving.api.serving import Serving
from quire.text.chat_template import ChatTemplate
from quire.text.pooled_texts import has_pair_roles, rendered_pair
from quire.text.text_pairs import Pair, PairLimits
from quire.text.tokenizer import Tokenizer

PIECE_CHARACTERS = 2**17
"""About how many characters of pairs are encoded in one piece of work, while other requests go on."""


def pair_template(serving: Serving) -> ChatTemplate | None:
    """The template that makes one text of a query and a document: --chat-template, or the checkpoint's if it has roles
    of these names; None without one."""
    template = serving.text.chat_template
    if template is None:
        return None
    is_own = serving.config.server.chat_template is not None
    return template if is_own or has_pair_roles(template) else None


async def encoded_pairs(
    serving: Serving,
    pairs: Sequence[Pair],
    cut: Cut,
    limits: tuple[int | None, int | None],
    info: PoolingInfo,
    variables: Mapping[str, Any],
    names: Sequence[str],
) -> list[PooledText]:
    """Each pair as token ids: by the template of pairs, or as the tokenizer puts two texts together, or one text behind
    the other where its model reads one text only.

    Args:
        limits: Maximum tokens of a query and of a document; None for all.
        variables: Of the template.
        names: What the client calls the second text of each pair, for errors.

    Raises:
        RequestError: A text is no valid Unicode, or the template refuses it.
        ContextLengthError: A pair is too long, and may not be cut.
    """
    tokenizer, template = serving.renderer.tokenizer, pair_template(serving)
    makes_texts = template is not None or not info.reads_pairs
    pairs = _as_read(tokenizer, pairs, cut, limits, makes_texts=makes_texts, lowercases=info.lowercases)
    if makes_texts:
        if template is None and variables:
            serving.text.hints.drop("instruction", "the model has no template of pairs")
        used = serving.text.hints.used(variables, template.variables) if template else {}
        work, found = partial(_as_texts, tokenizer, template, limits=limits, variables=used), list[PooledText]()
        for some in _pieces(pairs, encodes_equal_once=False):
            texts = await asyncio.to_thread(work, some)
            own = names[len(found) : len(found) + len(texts)]
            found += await _encoded_texts(serving, texts, cut, own)
            check_total(sum(len(text.tokens) for text in found), names[-1])
        return found
    return await _encoded_together(serving, pairs, cut, limits, names)


def _as_read(
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    cut: Cut,
    limits: tuple[int | None, int | None],
    *,
    makes_texts: bool,
    lowercases: bool,
) -> list[Pair]:
    """Pairs without what is cut off for certain, so that a long query does not cost its whole length for each document.

    Equal texts of a side become one object. With `makes_texts`, each pair becomes one text, and limits keep beginnings.
    """

    def read(text: str, limit: int | None) -> str:
        if limit is not None:
            text = tokenizer.end_of(text, limit, first=makes_texts or not cut.takes_beginnings)
        elif cut.kept is not None:
            text = tokenizer.end_of(text, cut.kept[0], first=not cut.takes_beginnings)
        return text.lower() if lowercases else text

    firsts, seconds = (
        {text: read(text, limit) for text in dict.fromkeys(side)}
        for side, limit in zip(zip(*pairs, strict=True), limits, strict=True)
    )
    return [(firsts[first], seconds[second]) for first, second in pairs]


def _as_texts(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    pairs: Sequence[Pair],
    *,
    limits: tuple[int | None, int | None],
    variables: Mapping[str, Any],
) -> list[str]:
    """One text for each pair."""
    found = []
    for first, second in pairs:
        query, document = _shortened(tokenizer, first, limits[0]), _shortened(tokenizer, second, limits[1])
        if template is None:
            found.append(query + document)
            continue
        found.append(rendered_pair(template, (query, document), variables))
    return found


def _shortened(tokenizer: Tokenizer, text: str, most: int | None) -> str:
    """The beginning of a text, of at most so many tokens."""
    if most is None:
        return text
    tokens = tokenizer.encode(tokenizer.end_of(text, most, first=True), add_special_tokens=False)
    return text if len(tokens) <= most else tokenizer.decode(tokens[:most], skip_special_tokens=False)


async def _encoded_texts(serving: Serving, texts: Sequence[str], cut: Cut, names: Sequence[str]) -> list[PooledText]:
    try:
        each = await serving.renderer.encode_each(texts, True, cut.longest, cut.kept)
    except ContextLengthError as error:
        if error.param and error.param.isdecimal():
            error.rename(names[int(error.param)])
        raise
    found = list[PooledText]()
    for tokens, name in zip(each, names, strict=True):
        with named_place(name, None):
            found.append(PooledText(cut.apply(tokens, serving.renderer.tokenizer.around)))
    return found


async def _encoded_together(
    serving: Serving, pairs: Sequence[Pair], cut: Cut, limits: tuple[int | None, int | None], names: Sequence[str]
) -> list[PooledText]:
    tokenizer, time_slice, found = serving.renderer.tokenizer, TimeSlice(), list[PooledText]()
    whole, side = cut.kept or (None, "right")
    kept = PairLimits(whole, *limits, cut_side=side)
    for pair, name in zip(pairs, names, strict=True):
        fewest = sum(tokenizer.fewest_tokens(text) for text in pair)
        if whole is None and limits == (None, None) and fewest > cut.longest:
            raise ContextLengthError(fewest, cut.longest, param=name, at_least=True)
    for some in _pieces(pairs, encodes_equal_once=True):
        for tokens, types in await asyncio.to_thread(tokenizer.encode_pairs, some, kept):
            with named_place(names[len(found)], None):
                found.append(PooledText(cut.apply(tokens), bytes(types)))
            await time_slice.offer()
        check_total(sum(len(text.tokens) for text in found), names[-1])
    return found


def _pieces(pairs: Sequence[Pair], *, encodes_equal_once: bool) -> list[list[Pair]]:
    """The pairs in order, in pieces of about PIECE_CHARACTERS. Where equal texts are encoded once, the query that a
    piece begins with does not count."""
    pieces, size = [list[Pair]()], 0
    for pair in pairs:
        if pieces[-1] and size > PIECE_CHARACTERS:
            pieces.append([])
            size = 0
        pieces[-1].append(pair)
        is_shared = encodes_equal_once and pair[0] is pieces[-1][0][0]
        size += len(pair[1]) + (0 if is_shared else len(pair[0]))
    return pieces
