"""What a request's body says about where to send it: its model, and the beginning of its prompt as blocks of bytes.

The router has no tokenizer. Blocks are cut from the JSON text of the fields that become the prompt, in the order in
which chat templates write them. Later turns of a conversation repeat the bytes before them, so equal blocks are equal
tokens. The reverse does not hold: the same JSON in another spelling has other blocks, where an engine may find a match.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from quire.errors import RequestError
from quire.serving.replica_chooser import MAX_BLOCKS

BLOCK_BYTES = 128
BYTES_PER_TOKEN = 4
"""Approximate bytes of a token in English text. It only serves to estimate loads."""
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
_DIGEST_BYTES = 16


class PromptFields(msgspec.Struct):
    """The fields of all endpoints that the router reads; all other fields are skipped."""

    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()

    def prompt_parts(self) -> Sequence[bytes]:
        """The fields that become the prompt, as they stand in the body."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input, self.token_ids)
        return [bytes(part) for part in parts if part]

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of the prompt."""
        return sum(map(len, self.prompt_parts())) // BYTES_PER_TOKEN


_decoder = msgspec.json.Decoder(PromptFields)


def read_fields(body: bytes) -> PromptFields:
    """Read the fields of a JSON body.

    Raises:
        RequestError: The body is no JSON object.
    """
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(f"The request body cannot be routed: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("The request body must be a JSON object.") from None


def prefix_blocks(fields: PromptFields) -> list[bytes]:
    """The hash chain over the prompt's full blocks, up to the longest that matters.

    It starts from the model's name (or an adapter's) and the salt: engines share no blocks between these.
    """
    text = b"\0".join(fields.prompt_parts())
    chain, blocks = f"{fields.model or ''}\0{fields.cache_salt or ''}".encode(), []
    for end in range(BLOCK_BYTES, min(len(text), MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        chain = blake2b(chain + text[end - BLOCK_BYTES : end], digest_size=_DIGEST_BYTES).digest()
        blocks.append(chain)
    return blocks


def session_blocks(session: str, fields: PromptFields) -> list[bytes]:
    """One block that stands for a session, so that all its requests have the same prefix."""
    return [blake2b(f"{fields.model or ''}\0session\0{session}".encode(), digest_size=_DIGEST_BYTES).digest()]
