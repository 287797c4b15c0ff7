"""Philox against the known answers of its authors (Random123, kat_vectors)."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference.philox import philox, uniform

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    found = philox(torch.tensor(words(counter)).unsqueeze(1), torch.tensor(words(key)).unsqueeze(1))
    assert found.squeeze(1).tolist() == words(expected)


def test_columns_do_not_mix() -> None:
    counters, keys, expected = (torch.tensor([words(k[i]) for k in KNOWN]).T for i in range(3))
    assert torch.equal(philox(counters, keys), expected)


def test_uniform_is_of_the_first_two_words() -> None:
    number = uniform(torch.tensor([0]), torch.tensor([0])).item()
    assert number == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53


def test_uniform_covers_the_unit_interval() -> None:
    numbers = uniform(torch.full((100_000,), -5), torch.arange(100_000))
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    counts = torch.histc(numbers.float(), 100, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001


def test_seeds_are_64_bits_wide() -> None:
    seeds = torch.tensor([1, 1 + 2**32, 1 - 2**63, 2])
    assert len(set(uniform(seeds, torch.zeros_like(seeds)).tolist())) == 4
