"""`python -m quire.engine.structured_output.checker_process`: translates constraints and tries to compile them, and
checks finished values.

Both may make it run out of time, stack or memory; whoever asks kills it and starts another. Single bytes are
its vocabulary, because it is a grammar's own size that may explode.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import socket
import time

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.engine.structured_output.finished_value import problem_of
from quire.engine.structured_output.grammars import compile_grammar, grammar_of
from quire.engine.structured_output.json_schema import SIMPLER, Simplified
from quire.engine.structured_output.messages import Constraint, FinishedValue, LenientSchema, Task, Verdict
from quire.engine.structured_output.structural_tag import SpecialTokens
from quire.foundation.processes.helper_process import Channel, run_helper

_ADDRESS_SPACE = 1536 * 2**20
"""Bytes that this process may map, its stack of 256 MiB included."""
_WALK_SECONDS = 0.02
_WALK_TOKENS = 64
"""How far a grammar is followed before it passes; clients wait for that as well."""
_BYTES_OF_MASK = 64
"""How much of a mask is read: nearly all single bytes are there."""
_LONGEST_MESSAGE = 400
_MAX_NAMED = 16
"""How many of the things that are left out of a schema are named."""
_KEYS = re.compile(r'Unimplemented keys: \["(.*?)"')
_OF_SCHEMA = re.compile(r"(?s).*failed to compile JSON schema: (.*?)(?:\n *1 \| .*|$)")
"""Its group is the part of a message that is about the client's schema, and not about the grammar around it."""


def main(connection: socket.socket) -> None:
    """Try constraints, one after the other."""
    os.nice(5)  # engines come first
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    parser = argparse.ArgumentParser()
    parser.add_argument("--special-tokens", default="{}")
    special = msgspec.json.decode(parser.parse_known_args()[0].special_tokens, type=dict[str, int])
    channel: Channel[Verdict, Task] = Channel(connection, Task)  # type: ignore[arg-type]
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(special)))
    channel.send(Verdict())  # ready
    while True:
        task = channel.receive(None)
        assert task is not None
        if isinstance(task, FinishedValue):
            channel.send(Verdict(error=problem_of(task)[:_LONGEST_MESSAGE]))
        else:
            channel.send(_judge(task, tokenizer, special))


def _judge(constraint: Constraint, tokenizer: LLTokenizer, special: SpecialTokens) -> Verdict:
    """The verdict on a constraint. Where a grammar need not enforce all of a schema, simpler ones are tried too."""
    lenient: list[LenientSchema] = []
    verdict = _tried(constraint, tokenizer, special, lenient, Simplified.NOT)
    if verdict.error and lenient:
        for simplified in SIMPLER:
            simpler = _tried(constraint, tokenizer, special, [], simplified)
            if not simpler.error:
                return simpler
    return verdict


def _tried(
    constraint: Constraint,
    tokenizer: LLTokenizer,
    special: SpecialTokens,
    lenient: list[LenientSchema],
    simplified: Simplified,
) -> Verdict:
    try:
        grammar = grammar_of(constraint, special, lenient, simplified)
        matcher = compile_grammar(tokenizer, grammar)
        _walk(matcher)
        if matcher.is_error():
            return Verdict(error=_readable(matcher.get_error()))
        warnings = [_readable(warning) for warning in matcher.get_grammar_warnings()]
    except RecursionError:
        return Verdict(error="it is nested too deeply: make it flatter")
    except MemoryError:
        return Verdict(error="it needs too much memory: make it smaller")
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(error=_readable(str(error)))
    for schema in lenient:  # which of them a warning is about is not known
        schema.left_out[:] = [" ".join(each.split())[:_LONGEST_MESSAGE] for each in (schema.left_out + warnings)]
        del schema.left_out[_MAX_NAMED:]
    return Verdict(grammar, lenient=[schema for schema in lenient if schema.left_out])


def _walk(matcher: LLMatcher) -> None:
    """Follow the grammar for some tokens: one that compiles may still need more than it may have."""
    end = time.thread_time() + _WALK_SECONDS
    draws = random.Random(0)
    for _ in range(_WALK_TOKENS):
        bits = matcher.compute_bitmask()[:_BYTES_OF_MASK]
        if matcher.is_stopped() or time.thread_time() > end:
            return
        allowed = [8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]
        if not allowed or not matcher.consume_token(draws.choice(allowed)):
            return


def _readable(message: str) -> str:
    """A message of the compiler as part of a sentence about what the client sent, without our own grammar."""
    if (match := _OF_SCHEMA.fullmatch(message)) is not None:
        message = match[1]
    if match := _KEYS.search(message):
        return f"keyword '{match[1]}' is not supported: leave it out"
    if "lexer error" in message or "too many" in message:
        return f"it becomes too complex within a few tokens ({' '.join(message.split())[:120]}): make it smaller"
    return " ".join(message.removesuffix("<non-verbose/>").split())[:_LONGEST_MESSAGE].rstrip(".")


class _Bytes:
    """A tokenizer of single bytes, beside the model's special tokens under their own ids."""

    bos_token_id = None

    def __init__(self, special: SpecialTokens) -> None:
        names = {token: name.encode() for name, token in special.items()}
        single = iter(range(257))  # the last is the end
        size = max(names, default=-1) + 1 + 257
        self.tokens = [names.get(token, b"") for token in range(size)]
        self._of_byte = []
        for token in range(size):
            if token not in names and (byte := next(single, None)) is not None:
                self.tokens[token] = bytes([byte]) if byte < 256 else b"<|quire_end|>"
                self._of_byte.append(token)
        self.eos_token_id = self._of_byte[256]
        self.special_token_ids = sorted({*names, self.eos_token_id})

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._of_byte[byte] for byte in (text.encode() if isinstance(text, str) else text)]


if __name__ == "__main__":
    run_helper(main)
