"""A thousand bodies that are wrong in all ways that a seed finds: each gets an answer, and nobody else notices."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.foundation.messages.from_engine import PoolingInfo
from tests.api.server import Server, running

NUMBER = 1_000
STALL_S = 1.0
ALL_TASKS = PoolingInfo(
    ["embed", "classify", "score", "token_embed", "token_classify"], dim=16, matryoshka=True, labels=["one"],
    reads_pairs=True, prompts={"query": "query: "},
)  # fmt: skip
CHAT = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 8, "encoding_format": "base64", "embed_dtype": "float16"},
    "/pooling": {"input": [[5, 6], [7]], "task": "token_embed", "truncate_prompt_tokens": 5},
    "/classify": {"messages": CHAT, "add_generation_prompt": False, "chat_template_kwargs": {}},
    "/score": {"text_1": "a", "text_2": ["b", "c"], "max_tokens_per_doc": 3, "use_activation": True},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True},
    "/v2/embed": {"texts": ["a"], "input_type": "query", "embedding_types": ["int8", "ubinary"], "truncate": "END"},
    "/api/embed": {"model": "tiny", "input": ["a"], "truncate": False, "options": {}},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
}
HOSTILE: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([0, -1, 2**31, 2**63, -(2**63) - 1, 10**400]),
    lambda rng: rng.choice([0.5, 1e308, -0.0, 1e-320]),
    lambda rng: "",
    lambda rng: rng.choice(["\0", "\u202e", "🙂" * 50, "a" * 9_000, "[CLS]", "<|im_start|>", "{{ 1 }}"]),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [[]],
    lambda rng: [rng.choice([1, "a", None, [1], {}])] * rng.choice([1, 3, 30, 3_000]),
    lambda rng: [rng.randrange(-5, 400) for _ in range(rng.choice([1, 600]))],
    lambda rng: {"text": rng.choice([None, "a", 5]), "content": rng.choice([None, [], [{"type": "text"}]])},
    lambda rng: [{"role": rng.choice(["user", "query", "", 5]), "content": rng.choice(["a", [], None, [{}]])}],
    lambda rng: _nested(rng.choice([3, 500, 5_000])),
]


def _nested(depth: int) -> Any:
    value: Any = "a"
    for _ in range(depth):
        value = [value]
    return value


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is probably wrong."""
    path = rng.choice(sorted(VALID))
    body = dict(VALID[path])
    for _ in range(rng.randint(1, 3)):
        known = [*body, "model", "priority", "timeout", "request_id", "cache_salt", "stream", "truncation_side", "user"]
        name = rng.choice([*known, "nonsense", "x" * 300, "inputs"])
        body[name] = rng.choice(HOSTILE)(rng)
    if rng.random() < 0.1:
        body.pop(rng.choice(sorted(body)))
    raw = dumped(body)
    if rng.random() < 0.15:  # cut off, or with wrong bytes
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.choice([b"", b"\xff\xfe", b"\0", b"}", b'"'])
    return path, raw


def dumped(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except RecursionError:
        return b'{"input":' + b"[" * 5_000 + b"]" * 5_000 + b"}"


class Watched:
    """A stream beside all that, and the longest time without a token in it, in seconds that this process worked: other
    processes may have the cores."""

    def __init__(self, server: Server) -> None:
        self._url = server.url + "/v1/completions"
        self._done = threading.Event()
        self.longest_gap = 0.0
        self.tokens = 0
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._done.set()
        self._thread.join(60)

    def _read(self) -> None:
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
        while not self._done.is_set():
            with httpx.stream("POST", self._url, json=body, timeout=60) as answer:
                last = time.process_time()
                for _ in answer.iter_lines():
                    now = time.process_time()
                    self.longest_gap, last = max(self.longest_gap, now - last), now
                    self.tokens += 1


@pytest.mark.long("api")
def test_each_gets_an_answer_and_no_stream_stalls(tmp_path: Path) -> None:
    rng, statuses = random.Random(20261130), dict[int, int]()
    with running(tmp_path, pooling=ALL_TASKS, step_s=0.005) as server:
        with Watched(server) as watched:
            for number in range(NUMBER):
                path, body = hostile(rng)
                answer = server.http.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
                timed_out = answer.status_code == 504 and b'"timeout"' in body
                assert answer.status_code < 500 or timed_out, (number, path, body[:500], answer.text)
                if answer.status_code != 200:
                    assert answer.json()["error"]
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert watched.tokens > 100
        assert watched.longest_gap < STALL_S
        assert server.get("/health").status_code == 200
        for path, fields in VALID.items():
            assert server.post(path, fields).status_code == 200, path
        server.assert_all_free()
    assert statuses[400] > NUMBER / 2
    assert statuses[200] > NUMBER / 20
