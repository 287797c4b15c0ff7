"""--lora-modules as they are written, and settings of adapters that cannot be meant."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.foundation.config.lora import LONGEST_NAME, LoraConfig


def test_modules_are_written_as_a_pair_or_as_json() -> None:
    written = ("a=x", "b=s3://bucket/key=1", '{"name": "c=d", "path": "y", "base_model_name": null}')
    assert LoraConfig(lora_modules=written).modules == {"a": "x", "b": "s3://bucket/key=1", "c=d": "y"}


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["a"], "name=path"),
        (["=x"], "name=path"),
        (["a=x", "a=y"], "twice"),
        (['{"name": "a"}'], "name=path"),
        (['{"name": 1}'], "no JSON"),
        (['{"name": "a", "path": "x", "colour": "red"}'], "'colour'"),
        (["base=x"], "'base' is the base model's name"),
        (["a" * (LONGEST_NAME + 1) + "=x"], "longer than 256 characters"),
    ],
)
def test_modules_that_cannot_be_meant_are_refused(modules: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        LoraConfig(enable_lora=True, lora_modules=tuple(modules)).check(["model", "base"])
    assert refused.value.param == "lora_modules"


def test_only_modules_of_the_start_are_pinned() -> None:
    with pytest.raises(ConfigError, match="b is none of --lora-modules"):
        LoraConfig(enable_lora=True, lora_modules=("a=x",), lora_pinned=("b",)).check([])
