"""`python -m quire.structured_output.checker_process`: translates constraints and tries to compile them.

It may run out of time, stack or memory at each of them; whoever asks kills it and starts another. Single bytes are its
vocabulary, because it is a grammar's own size that may explode.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import socket

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.processes.helper_process import Channel, run_helper
from quire.structured_output.constraint import Constraint
from quire.structured_output.grammars import grammar_of
from quire.structured_output.lark_text import SpecialTokens
from quire.structured_output.limits import CHECK_ADDRESS_SPACE, parser_limits
from quire.structured_output.verdict import Verdict

_LONGEST_MESSAGE = 400
_FORMAT = re.compile(r"Unknown format: (.{1,64})")
_KEYS = re.compile(r'Unimplemented keys: \["(.*?)"')


def main(connection: socket.socket) -> None:
    """Judge constraints, one after the other."""
    os.nice(5)  # engines come first
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_ADDRESS_SPACE, CHECK_ADDRESS_SPACE))
    special = msgspec.json.decode(_arguments().special_tokens, type=dict[str, int])
    channel: Channel[Verdict, Constraint] = Channel(connection, Constraint)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(special)))
    channel.send(Verdict())  # ready
    while True:
        constraint = channel.receive(None)
        assert constraint is not None
        channel.send(_judge(constraint, tokenizer, special))


def _judge(constraint: Constraint, tokenizer: LLTokenizer, special: SpecialTokens) -> Verdict:
    try:
        grammar = grammar_of(constraint, special)
        matcher = LLMatcher(tokenizer, grammar, limits=parser_limits(), log_level=0)
        if matcher.is_error():
            return Verdict(error=_readable(matcher.get_error()))
        matcher.compute_bitmask()
        if matcher.is_error():
            return Verdict(error=_readable(matcher.get_error()))
    except RecursionError:
        return Verdict(error="it is nested too deeply: make it flatter")
    except MemoryError:
        return Verdict(error="it needs too much memory: make it smaller")
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(error=_readable(str(error)))
    return Verdict(grammar)


def _readable(message: str) -> str:
    """A message of the compiler, as part of a sentence."""
    if match := _KEYS.match(message):
        return f"keyword '{match[1]}' is not supported: leave it out"
    if match := _FORMAT.match(message):
        return f"format '{match[1]}' is not supported: use 'pattern'"
    if message.startswith("oneOf "):
        return "keyword 'oneOf' is supported only where its parts exclude each other: use 'anyOf'"
    return " ".join(message.split())[:_LONGEST_MESSAGE].rstrip(".")


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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--special-tokens", default="{}")
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    run_helper(main)
