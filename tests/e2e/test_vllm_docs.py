"""What vLLM's documentation and recipes tell people to type runs with `quire` for `vllm` and small models: all entries
of vllm_docs.toml, whose head says what they have."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM
from quire.cli.flags import parse_config
from quire.cli.main import main
from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.engine.thinking_budgets import bitmask_source
from quire.foundation.clock import SystemClock
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from quire.serving.supervisor.announce import announce_settings
from tests.adapters import make_adapter
from tests.api.server import Server
from tests.api.speaker import make_special
from tests.checkpoints import make_tiny, write_tokenizer
from tests.e2e.serve import QuireServe
from tests.models_sweep.rows import ROWS, SHAPE
from tests.offline.test_pooling import bert, sentence_files, tiny

DOCS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "vllm_docs.toml").read_text())
ADAPTER = "/path/to/sql-lora-adapter"
KV_BYTES = 2**26
"""The KV cache of each server here; those of the docs take what is left of a card."""
QUILL = Path(__file__).parents[2] / "quire" / "builtin" / "quill"


@dataclass(frozen=True)
class Entry:
    """An entry of the list; see there."""

    title: str
    kind: str
    text: str
    says: list[str]
    asks: str = ""
    name: str = ""
    long: str = ""


ENTRIES = [Entry(**{("name" if key == "as" else key): value for key, value in row.items()}) for row in DOCS["entry"]]
STAYING = {entry.name: entry for entry in ENTRIES if entry.name}
"""Those that stay up."""


def embedder(directory: Path) -> Path:
    bert(directory, "BertModel")
    sentence_files(directory, {"pooling_mode": "mean", "include_prompt": True})
    return directory


def cross_encoder(directory: Path) -> Path:
    return bert(directory, "XLMRobertaForSequenceClassification", num_labels=1)


def classifier(directory: Path) -> Path:
    return tiny(directory, "Qwen2ForSequenceClassification", num_labels=3)


def qwen3_embedding(directory: Path) -> Path:
    sentence_files(tiny(directory, "Qwen3ForCausalLM"), {"pooling_mode": "lasttoken"}, ("Normalize", {}))
    return directory


def qwen3_reranker(directory: Path) -> Path:
    make_special(tiny(directory, "Qwen3ForCausalLM") / "tokenizer.json", ["no", "yes"])
    return directory


MAKERS: dict[str, Callable[[Path], Path]] = {
    "quill": lambda directory: QUILL,
    "embedder": embedder,
    "cross_encoder": cross_encoder,
    "classifier": classifier,
    "qwen3_embedding": qwen3_embedding,
    "qwen3_reranker": qwen3_reranker,
}


def small(kind: str, directory: Path) -> Path:
    """The small model of a kind that `[models]` names."""
    if kind in MAKERS:
        return MAKERS[kind](directory)
    long = {} if kind == "OPTForCausalLM" else {"max_position_embeddings": 40_960}
    write_tokenizer(make_tiny(directory, kind, **SHAPE | ROWS[kind] | long))
    return directory


class Typist:
    """Types what the list says, with small models in a directory of their own. What is asked for twice is made once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._models: dict[str, Path] = {}
        self._servers: dict[str, str] = {}
        self._open = contextlib.ExitStack()
        for name, content in DOCS["files"].items():
            (directory / name).write_text(self.translated(content))

    def translated(self, text: str) -> str:
        """A text with `quire` for `vllm`, and what is here for models and adapters."""
        for name, kind in DOCS["models"].items():
            if name in text:
                text = text.replace(name, str(self._model(kind)))
        if ADAPTER in text:
            text = text.replace(ADAPTER, str(self._adapter()))
        return re.sub(r"\bvllm\b(?=[ .])", "quire", text)

    def text_of(self, entry: Entry) -> str:
        """What is typed: the address is that of the server which the entry asks."""
        text = self.translated(entry.text)
        return (
            re.sub(r"(localhost|127\.0\.0\.1|0\.0\.0\.0):8000", self.server(entry.asks), text) if entry.asks else text
        )

    def close(self) -> None:
        """End all servers."""
        self._open.close()

    def answer(self, entry: Entry) -> str:
        """What the server of a command answers to a question."""
        with self.served(entry) as (server, model):
            key = re.search(r"--api-key (\S+)", entry.text)
            headers = {"Authorization": f"Bearer {key[1]}"} if key else {}
            body = {"model": model, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4}
            answer = server.post("/v1/chat/completions", body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.text

    @contextlib.contextmanager
    def served(self, entry: Entry) -> Iterator[tuple[Server, str]]:
        """The server of a command, in this process, and the name of its model; it says its settings as usual."""
        (words,) = commands(self.text_of(entry))
        resolved = resolve(parse_config(words[2:], "quire serve", ""), replicas=True)
        announce_settings(resolved.config, resolved.reasons)
        config, clock = resolved.config.with_values(kv_cache_memory_bytes=KV_BYTES), SystemClock()
        runtime_info = build_model_runtime_info(config, resolved.spec)
        masker = bitmask_source(config, resolved.spec.vocab_size)
        client = InProcessClient(config, build_executor(config, clock), clock, runtime_info, masker)
        with contextlib.closing(client), Server(config, lambda: client) as server:
            yield server.wait_ready(), config.model.model

    def server(self, name: str) -> str:
        """Host and port of a server that stays up."""
        if name not in self._servers:
            if name == "chat":  # in processes of its own, as users start it
                (words,) = commands(self.text_of(STAYING[name]))
                process = self._open.enter_context(QuireServe(*words[2:], "--port", "0"))
                url = process.wait_ready().url
            else:
                url = self._open.enter_context(self.served(STAYING[name]))[0].url
            self._servers[name] = url.removeprefix("http://")
        return self._servers[name]

    def _model(self, kind: str) -> Path:
        if kind not in self._models:
            self._models[kind] = small(kind, self.directory / kind)
        return self._models[kind]

    def _adapter(self) -> Path:
        path = self.directory / "adapter"
        return path if path.exists() else make_adapter(path, self._model("LlamaForCausalLM"))


def commands(text: str) -> list[list[str]]:
    """The words of a line's commands, each without what it is piped into."""
    words: list[list[str]] = [[]]
    for word in shlex.split(text.replace("\\\n", " ").strip().removesuffix("&")):
        if word == "&&":
            words.append([])
        else:
            words[-1].append(word)
    return [each[: each.index("|")] if "|" in each else each for each in words]


def typed(words: list[str]) -> None:
    """Run a command, which prints what it has to say and ends well."""
    if words[0] == "cat":
        print(Path(words[1]).read_text())
        return
    assert words[0] == "quire"
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code == 0


def script(text: str) -> None:
    """Run a script, and free the models that it leaves."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(text, "a script", "exec", dont_inherit=True), names)
    finally:
        for value in names.values():
            if isinstance(value, LLM):
                value.close()


def curled(words: list[str]) -> str:
    """What a curl command prints."""
    assert words[0] == "curl"
    flags = argparse.ArgumentParser(allow_abbrev=False)
    for flag, name in (("-X", "method"), ("-H", "headers"), ("-d", "data")):
        flags.add_argument(flag, dest=name, action="append" if flag == "-H" else "store")
    flags.add_argument("url")
    given = flags.parse_args(words[1:])
    headers = dict(header.split(": ", 1) for header in given.headers or [])
    answer = httpx.request(
        given.method or ("POST" if given.data else "GET"), given.url, headers=headers, content=given.data, timeout=120
    )
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.fixture(scope="module")
def typist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typist]:
    typist = Typist(tmp_path_factory.mktemp("docs"))
    yield typist
    typist.close()


def marked(entry: Entry) -> Any:
    marks = [pytest.mark.long(entry.long)] if entry.long else []
    return pytest.param(entry, id=entry.title, marks=marks)


@pytest.mark.parametrize("entry", map(marked, ENTRIES))
def test_what_the_docs_of_vllm_say_runs(
    entry: Entry, typist: Typist, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(typist.directory)
    monkeypatch.setenv("XDG_STATE_HOME", str(typist.directory / "state"))
    text = typist.text_of(entry)
    said = ""
    if entry.kind == "python":
        script(text)
    elif entry.kind == "request":
        said = curled(commands(text)[0])
    elif entry.name:
        said = httpx.get(f"http://{typist.server(entry.name)}/v1/models").text
    elif "quire serve" in text:
        said = typist.answer(entry)
    else:
        for words in commands(text):
            at = [] if ":" in text or not entry.asks else ["--base-url", f"http://{typist.server(entry.asks)}"]
            typed([*words, *at])
    out, err = capsys.readouterr()
    said += out + err
    for expected in entry.says:
        assert re.search(typist.translated(expected), said, re.MULTILINE), said
