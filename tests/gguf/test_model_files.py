"""GGUF models as directories: written once for each state of the files, found by what --model and --gguf-file say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.compute.gguf.architectures import ARCHITECTURES
from quire.compute.gguf.model_files import choose, directory_of
from quire.errors import CheckpointError, ConfigError, ModelNotFoundError, QuireError
from quire.models.spec import read_spec
from quire.models.weights import hub
from quire.models.weights.hub import GgufChoice
from quire.text.tokenizer import load_tokenizer
from tests.gguf.bytes import (
    ARRAY,
    BOOL,
    EMBEDDING,
    EMBEDDING_DATA,
    F32,
    I32,
    SMALLEST,
    STRING,
    U16,
    U32,
    U64,
    file,
    smallest,
    tensor,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "gguf"


def write(path: Path, content: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(smallest() if content is None else content)
    return path


def test_a_file_becomes_a_directory_once(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    directory = hub.resolve(str(path))
    assert directory.parent == cache
    assert {p.name for p in directory.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tiny.gguf",
    }  # fmt: skip
    spec = read_spec(directory)
    assert (spec.architecture, spec.hidden, spec.vocab_size, spec.tie_embeddings) == ("LlamaForCausalLM", 32, 4, True)
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": [3]}
    assert hub.resolve(str(path)) == directory == hub.resolve(str(directory))
    write(path, smallest(llama__context_length=(U32, 128)))
    changed = hub.resolve(str(path))
    assert changed != directory
    assert read_spec(changed).max_model_len == 128


def test_directories_of_files_that_are_gone_go_too(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "old.gguf")
    old = directory_of([path], tokenizer=True)
    path.unlink()
    new = directory_of([write(tmp_path / "new.gguf")], tokenizer=True)
    assert set(cache.iterdir()) == {new}
    assert not old.exists()


def test_another_tokenizer_makes_up_for_one_that_is_not_served(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", smallest(tokenizer__ggml__pre=(STRING, "brand-new")))
    with pytest.raises(CheckpointError, match=r"brand-new.*--tokenizer"):
        hub.resolve(str(path))
    directory = hub.resolve(str(path), gguf=GgufChoice(tokenizer=False))
    assert not (directory / "tokenizer.json").exists()
    assert read_spec(directory).hidden == 32


def test_of_several_files_one_must_be_meant(tmp_path: Path) -> None:
    place = tmp_path / "models"
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-Q8_0.gguf", "mmproj-tiny-f16.gguf"):
        write(place / name)
    with pytest.raises(ModelNotFoundError, match=r"has 3 GGUF models.*--gguf-file"):
        hub.resolve(str(place))
    assert (hub.resolve(f"{place}:Q8_0") / "tiny-Q8_0.gguf").exists()
    assert (hub.resolve(f"{place}:q4_k_m") / "tiny-Q4_K_M.gguf").exists()
    assert (hub.resolve(str(place), gguf=GgufChoice("tiny-Q4_K_S.gguf")) / "tiny-Q4_K_S.gguf").exists()
    with pytest.raises(ModelNotFoundError, match="several of them with 'Q4_K'"):
        hub.resolve(f"{place}:Q4_K")
    with pytest.raises(ModelNotFoundError, match="no such file"):
        hub.resolve(str(place), gguf=GgufChoice("other.gguf"))
    with pytest.raises(ConfigError, match="gguf-file"):
        hub.resolve(str(place / "tiny-Q8_0.gguf"), gguf=GgufChoice("other.gguf"))


def test_a_directory_of_safetensors_keeps_its_format(tmp_path: Path) -> None:
    write(tmp_path / "both" / "tiny.gguf")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "both" / name).write_text("{}")
    assert hub.resolve(str(tmp_path / "both")) == tmp_path / "both"
    assert hub.resolve(str(tmp_path / "both"), gguf=GgufChoice("tiny.gguf")) != tmp_path / "both"


def split(number: int, count: int = 2, tensors: int = 2) -> bytes:
    own: dict[str, Any] = {
        "split.no": (U16, number),
        "split.count": (U16, count),
        "split.tensors.count": (U32, tensors),
    }
    if number == 0:
        from tests.gguf.bytes import SMALLEST

        return file(SMALLEST | own, [tensor("token_embd.weight", [32, 4])], EMBEDDING_DATA)
    return file(own, [tensor("output_norm.weight", [32])], bytes(128))


def test_split_files_are_one_model(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"tiny-0000{n + 1}-of-00002.gguf", split(n)) for n in range(2)]
    directory = hub.resolve(str(parts[0]))
    assert directory == hub.resolve(str(parts[1])) == hub.resolve(str(tmp_path))
    assert sorted(p.name for p in directory.glob("*.gguf")) == [p.name for p in parts]
    write(parts[1], split(0))
    with pytest.raises(CheckpointError, match="not part 2 of 2"):
        hub.resolve(str(parts[0]))
    write(parts[1], split(1, tensors=3))
    write(parts[0], split(0, tensors=3))
    with pytest.raises(CheckpointError, match="declares 3 tensors"):
        hub.resolve(str(parts[0]))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks tiny-00002-of-00002\.gguf"):
        hub.resolve(str(parts[0]))


def test_names_are_chosen_by_whole_words() -> None:
    names = ["a/m-Q4_0-00001-of-00002.gguf", "a/m-Q4_0-00002-of-00002.gguf", "m.IQ4_0.gguf", "m-q8_0.gguf"]
    assert choose(names, "Q4_0", "org/m") == names[0]
    assert choose(names, "Q8_0", "org/m") == names[3]


ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "a billion layers": ({"llama__block_count": (U32, 1 << 30)}, "block_count"),
    "wide heads": ({"llama__attention__key_length": (U32, 1 << 30)}, "key_length"),
    "a wide stream": ({"llama__embedding_length": (U32, 1 << 30)}, "embedding_length"),
    "heads by layer": ({"llama__attention__head_count": (ARRAY, (U32, [2, 4]))}, "differs by layer"),
    "heads in text": ({"llama__attention__head_count": (STRING, "two")}, "number of heads"),
    "no heads": ({"llama__attention__head_count": None}, "number of heads"),
    "no width": ({"llama__embedding_length": None}, "hidden_size"),
    "a norm of NaN": ({"llama__attention__layer_norm_rms_epsilon": (F32, float("nan"))}, "rms_norm_eps"),
    "another architecture": ({"general__architecture": (STRING, "mamba")}, "'mamba'.*served are llama"),
    "no architecture": ({"general__architecture": None}, "None"),
    "unknown rope": ({"llama__rope__scaling__type": (STRING, "spiral")}, "spiral"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_models_are_refused_before_anything_is_built(case: str, tmp_path: Path) -> None:
    changed, message = ABSURD[case]
    with pytest.raises(CheckpointError, match=message):
        read_spec(directory_of([write(tmp_path / "tiny.gguf", smallest(**changed))], tokenizer=True))


TRIALS = 100
_KEYS = (
    "general.architecture", "general.name", "general.alignment", "{}.block_count", "{}.embedding_length",
    "{}.feed_forward_length",
    "{}.attention.head_count", "{}.attention.head_count_kv", "{}.attention.key_length", "{}.context_length",
    "{}.attention.layer_norm_rms_epsilon", "{}.attention.sliding_window", "{}.attention.sliding_window_pattern",
    "{}.attn_logit_softcapping", "{}.final_logit_softcapping", "{}.rope.freq_base", "{}.rope.freq_base_swa",
    "{}.rope.dimension_count", "{}.rope.scaling.type", "{}.rope.scaling.factor", "{}.rope.scaling.attn_factor",
    "{}.rope.scaling.original_context_length", "{}.rope.scaling.yarn_beta_fast", "{}.expert_count",
    "{}.expert_used_count", "{}.expert_feed_forward_length", "{}.expert_weights_norm", "{}.expert_shared_count",
    "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template", "tokenizer.chat_templates",
)  # fmt: skip
_HOSTILE: tuple[tuple[int, Any], ...] = (
    (U32, 0), (U32, 1), (U32, (1 << 32) - 1), (I32, -1), (U64, 1 << 63), (F32, float("nan")), (F32, float("inf")),
    (F32, -1e30), (F32, 0.5), (BOOL, True), (STRING, ""), (STRING, "yarn"), (STRING, "llama"), (STRING, "\0\n{{"),
    (ARRAY, (U32, [])), (ARRAY, (STRING, ["", "x y z", "a"])), (ARRAY, (I32, [-1, 1 << 30])),
    (ARRAY, (F32, [float("nan")] * 4)), (ARRAY, (ARRAY, [(U32, [1])])),
)  # fmt: skip


def test_any_value_of_any_key_is_read_or_refused(tmp_path: Path) -> None:
    """One or two keys at a time, in all architectures; no other error than ours."""
    generator = random.Random(18)
    path = tmp_path / "tiny.gguf"
    for number in range(TRIALS):
        name = generator.choice(list(ARCHITECTURES))
        metadata = {key.replace("llama.", f"{name}."): entry for key, entry in SMALLEST.items()}
        metadata["general.architecture"] = STRING, name
        for _ in range(1 + number % 2):
            metadata[generator.choice(_KEYS).format(name)] = generator.choice(_HOSTILE)
        path.write_bytes(file(metadata, [EMBEDDING], EMBEDDING_DATA))
        try:
            directory = directory_of([path], tokenizer=True)
            load_tokenizer(directory).encode("ab <|im_end|>")
            read_spec(directory)
        except QuireError:
            continue
        except Exception as error:
            raise AssertionError(f"{metadata}") from error
