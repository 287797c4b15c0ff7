"""A chain of hashes: the same however it is asked for, and not hashed much farther than it is read."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from quire.scheduling.kvcache.block_hashes import BlockHashes

SIZE = 4
TOKENS = list(range(1_000))


def whole() -> list[bytes]:
    return BlockHashes(SIZE, "salt").hash_up_to(TOKENS, len(TOKENS))


@pytest.mark.parametrize("read", [0, 1, 2, 7, 100])
def test_no_more_is_hashed_than_twice_what_is_read(read: int) -> None:
    hashes = BlockHashes(SIZE, "salt")
    assert list(islice(hashes.iter_hashes(TOKENS, len(TOKENS)), read)) == whole()[:read]
    assert len(hashes.hash_up_to(TOKENS, 0)) <= 2 * read


@pytest.mark.parametrize("known", [0, 1, 5, 20, 250])
@pytest.mark.parametrize("length", [0, 3, 4, 43, 1_000])
def test_the_chain_goes_on_where_it_was_left(known: int, length: int) -> None:
    """Also where more is known than is asked for."""
    hashes = BlockHashes(SIZE, "salt")
    hashes.hash_up_to(TOKENS, known * SIZE)
    assert list(hashes.iter_hashes(TOKENS, length)) == whole()[: length // SIZE]
    assert hashes.hash_up_to(TOKENS, len(TOKENS)) == whole()


@pytest.mark.parametrize("head", [0, 1, 4, 43, 996, 1_000])
@pytest.mark.parametrize("known", [0, 2, 20])
@pytest.mark.parametrize("length", [0, 3, 43, 1_000])
def test_the_chain_is_the_same_whoever_has_turned_its_first_tokens_into_bytes(
    head: int, known: int, length: int
) -> None:
    hashes = BlockHashes(SIZE, "salt", np.array(TOKENS[:head], dtype=np.int64).tobytes())
    hashes.hash_up_to(TOKENS, known * SIZE)
    assert list(hashes.iter_hashes(TOKENS, length)) == whole()[: length // SIZE]
    assert hashes.hash_up_to(TOKENS, len(TOKENS)) == whole()


@pytest.mark.parametrize("hashed", [0, 43, 1_000])
def test_another_salt_begins_the_same_sequence_anew(hashed: int) -> None:
    hashes = BlockHashes(SIZE, "other", np.array(TOKENS[:500], dtype=np.int64).tobytes())
    hashes.hash_up_to(TOKENS, hashed)
    assert hashes.salted("salt").hash_up_to(TOKENS, len(TOKENS)) == whole()


def test_tokens_and_salts_tell_chains_apart_from_there_on() -> None:
    other = [*TOKENS[:50], 7, *TOKENS[51:]]
    found = BlockHashes(SIZE, "salt").hash_up_to(other, len(other))
    assert found[:12] == whole()[:12]
    assert not {*found[12:]} & {*whole()}
    assert not {*BlockHashes(SIZE).hash_up_to(TOKENS, len(TOKENS))} & {*whole()}


def test_an_adapters_blocks_are_nobody_elses() -> None:
    """Whatever salt is given: no request finds what another adapter, or none, has computed."""
    own = BlockHashes(SIZE, "salt", adapter="a1").hash_up_to(TOKENS, len(TOKENS))
    others = [("", ""), ("salt", ""), ("salt", "a2"), ("", "a1"), ("a1\0salt", ""), (" of a1\0salt", "")]
    for salt, adapter in [*others, ("1\0salt", "a")]:
        assert not {*BlockHashes(SIZE, salt, adapter=adapter).hash_up_to(TOKENS, len(TOKENS))} & {*own}
    assert BlockHashes(SIZE, "salt", adapter="a1").hash_up_to(TOKENS, len(TOKENS)) == own
    assert BlockHashes(SIZE, "other", adapter="a1").salted("salt").hash_up_to(TOKENS, len(TOKENS)) == own
    trunk = BlockHashes(SIZE, "salt", adapter="a1")
    branch = trunk.branch(40)
    assert branch.hash_up_to(TOKENS, len(TOKENS)) == own
    assert branch.salted("salt").hash_up_to(TOKENS, len(TOKENS)) == own
