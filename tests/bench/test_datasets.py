"""Datasets: lengths as asked, the same for the same seed, files read or refused by name."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.errors import ConfigError
from quire.tools.bench.datasets import DatasetOptions, LocalTokens, Sample, make_samples


class Letters:
    """A letter is a token."""

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        return rng.choices(range(97, 123), k=count)

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def draw(seed: int = 0, **options: Any) -> list[Sample]:
    return make_samples(DatasetOptions(**options), Letters(), random.Random(seed))


def test_random_prompts_have_their_lengths_and_differ() -> None:
    samples = draw(num_prompts=20, input_len=7, output_len=3)
    assert {len(sample.prompt) for sample in samples} == {7}
    assert {sample.output_len for sample in samples} == {3}
    assert len({str(sample.prompt) for sample in samples}) == 20
    assert samples == draw(num_prompts=20, input_len=7, output_len=3)
    assert samples != draw(1, num_prompts=20, input_len=7, output_len=3)


def test_random_lengths_spread_and_a_prefix_is_shared() -> None:
    samples = draw(
        num_prompts=200, random_input_len=100, random_output_len=10, random_range_ratio=0.5, random_prefix_len=5
    )
    lengths = [len(sample.prompt) - 5 for sample in samples]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert {5, 15} <= {sample.output_len for sample in samples} <= set(range(5, 16))
    assert len({tuple(sample.prompt[:5]) for sample in samples}) == 1


def test_random_images_have_their_numbers_and_sizes() -> None:
    own = {"dataset_name": "random-mm", "num_prompts": 40, "random_input_len": 5}
    buckets = "{(30, 50, 1): 0.5, (64, 64, 1): 0.5, (720, 1280, 16): 0.0}"
    asked = own | {"random_mm_base_items_per_request": 2, "random_mm_num_mm_items_range_ratio": 0.5,
                   "random_mm_limit_mm_per_prompt": '{"image": 2}', "random_mm_bucket_config": buckets}  # fmt: skip
    options = DatasetOptions(**asked)
    samples = make_samples(options, LocalTokens(100), random.Random(1), takes_images=True)
    assert {len(sample.images) for sample in samples} == {1, 2}
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for s in samples for url in s.images]
    assert {(image.height, image.width) for image in images} == {(30, 50), (64, 64)}
    assert len({image.tobytes() for image in images}) == len(images)
    again = make_samples(options, LocalTokens(100), random.Random(1), takes_images=True)
    assert again == samples
    with pytest.raises(ConfigError, match="--backend openai-chat"):
        draw(**own)
    for wrong in ({"bucket_config": "{(8, 8, 4): 1.0}"}, {"bucket_config": "nothing"}, {"bucket_config": "{1: 1.0}"},
                  {"limit_mm_per_prompt": "{}"}, {"base_items_per_request": -1}):  # fmt: skip
        options = DatasetOptions(**own | {f"random_mm_{name}": value for name, value in wrong.items()})
        with pytest.raises(ConfigError, match="--random-mm-"):
            make_samples(options, LocalTokens(100), random.Random(1), takes_images=True)


def test_prefixes_are_repeated_evenly() -> None:
    samples = draw(
        dataset_name="prefix_repetition", num_prompts=20, prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=8, prefix_repetition_suffix_len=6, prefix_repetition_output_len=2,
    )  # fmt: skip
    prefixes = [tuple(sample.prompt[:8]) for sample in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5] * 4
    assert {(len(sample.prompt), sample.output_len) for sample in samples} == {(14, 2)}


def test_sharegpt_keeps_usual_conversations(tmp_path: Path) -> None:
    talks = [
        ("how are you", "fine thanks"),
        ("abc", "too short a prompt"),
        ("p" * 1025, "too long"),
        ("p" * 1000, "a" * 1100),
    ]
    content = [{"conversations": [{"value": a}, {"value": b}]} for a, b in talks] + [
        {"conversations": [{"value": "x"}]}
    ]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(content))
    assert draw(dataset_path=str(file)) == [Sample("how are you", len("fine thanks"))]
    assert [sample.output_len for sample in draw(dataset_path=str(file), sharegpt_output_len=1)] == [1, 1]


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 9}\n')
    found = {sample.prompt: sample.output_len for sample in draw(dataset_path=str(file), custom_output_len=4)}
    assert found == {"one": 4, "two": 9}
    assert {sample.output_len for sample in draw(dataset_path=str(file), output_len=2)} == {2}
    assert len(draw(dataset_path=str(file), num_prompts=1)) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"input_len": 0}, "at least 1 token"),
        ({"output_len": 0, "dataset_name": "prefix_repetition"}, "output length"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"dataset_name": "prefix_repetition", "prefix_repetition_num_prefixes": 0}, "num-prefixes"),
        ({"dataset_name": "sharegpt"}, "needs --dataset-path"),
        ({"dataset_path": "/no/such.json"}, "/no/such.json"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"dataset_name": "custom", "output_len": 0},
        {"dataset_name": "custom", "custom_output_len": 0},
        {"dataset_name": "sharegpt", "output_len": 0},
        {"dataset_name": "sharegpt", "sharegpt_output_len": 0},
    ],
)
def test_no_output_is_refused_and_not_taken_for_the_default(tmp_path: Path, options: dict[str, Any]) -> None:
    talk = {"prompt": "how are you", "conversations": [{"value": "how are you"}, {"value": "fine thanks"}]}
    file = tmp_path / "own.json"
    file.write_text(json.dumps([talk]))
    with pytest.raises(ConfigError, match="output length"):
        draw(dataset_path=str(file), **options)


@pytest.mark.parametrize("content", ['{"text": "x"}\n', "{\n", "", "[1]\n"])
def test_broken_files_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"own\.jsonl"):
        draw(dataset_path=str(file))


def test_a_vocabulary_alone_gives_ids_within_it_and_no_text() -> None:
    tokens = LocalTokens(10)
    assert set(tokens.random_ids(1000, random.Random(0))) == set(range(3, 10))
    with pytest.raises(ConfigError, match="--tokenizer"):
        tokens.encode("x")
