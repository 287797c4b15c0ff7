"""A server on a loopback port, over the real engine with the fake executor: what API tests talk to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from quire.engine.build import ModelRuntimeInfo, build_model_runtime_info
from quire.engine.client import EngineClient
from quire.engine.inprocess import InProcessClient
from quire.engine.thinking_budgets import bitmask_source
from quire.errors import UnavailableError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import NO_POOLING, PoolingInfo
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from quire.serving.api.http_server import BoundedHttpProtocol
from quire.serving.api.request_traces import RequestTraces
from quire.serving.api.schemas.model_change import ModelChange
from quire.serving.api.session.session import EngineSession
from quire.serving.app import create_app
from quire.text.model_text import ModelText, load_model_text
from tests.api.answer_recorder import Answer, AnswerRecorder
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.executor.fake import FakeExecutor

KEY = "a secret key"
MAX_MODEL_LEN = 512
ANSWERS: list[Answer] = []
"""What servers here have answered since the test began; `answers_are_of_their_types` takes it out."""


def resolved(directory: Path, **settings: Any) -> Config:
    """Settings as `quire.planning.auto_config` would resolve them, for a directory with a tokenizer only."""
    if not (directory / "tokenizer.json").exists():
        write_tokenizer(directory)
    return Config().with_values(**{
        "model": str(directory),
        "tokenizer": str(directory),
        "served_model_name": ("tiny", "alias"),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "disable_log_stats": True,
        "responses_store_path": str(directory / "store" / "store.sqlite"),
        **settings,
    })  # fmt: skip


def count_up(history: Sequence[int], drawn: int, vocab_size: int) -> int:
    """A model that goes through printable ASCII for ever: the text after "a" is "bcd…"."""
    return 3 + (history[-1] - 3 + 1) % 94


class Pace:
    """The same model, slow until it is told to hurry: so a request is open for as long as a test looks at it, however
    slow the machine is, and over soon afterwards."""

    def __init__(self) -> None:
        self._hurried = threading.Event()

    def __call__(self, history: Sequence[int], drawn: int, vocab_size: int) -> int:
        self.wait()
        return count_up(history, drawn, vocab_size)

    def wait(self) -> None:
        """As long as a token takes."""
        self._hurried.wait(0.05)

    def hurry(self) -> None:
        """Tokens take no time from now on."""
        self._hurried.set()

    def slow(self) -> None:
        """They take long again."""
        self._hurried.clear()


@contextlib.asynccontextmanager
async def uvicorn_server(app: Any) -> AsyncIterator[str]:
    """An application on a loopback port, in this event loop; its address."""
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="critical", http=BoundedHttpProtocol))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


class NoSwaps:
    """In place of what swaps models: there is one."""

    def document(self) -> dict[str, Any]:
        return {"object": "model_swap", "swap": None}

    async def begin(self, change: ModelChange) -> None:
        raise UnavailableError("Nothing is swapped here.")

    async def wait_end(self) -> None:
        pass


class Server:
    """A running server.

    Attributes:
        url: Its address.
        session: Its engine session, for looking at from outside.
        http: A client, for full addresses.
    """

    def __init__(
        self,
        config: Config,
        client: Callable[[], EngineClient] | None = None,
        *,
        more: Sequence[EngineClient] = (),
        step_s: float = 0.0,
        num_blocks: int = 256,
        vocab_size: int = VOCAB_SIZE,
        sample: Callable[[Sequence[int], int, int], int] = count_up,
        developer_mode: bool = True,
        slow_reader_s: float = 30.0,
        masked: bool = False,
        traces: RequestTraces | None = None,
        pooling: PoolingInfo = NO_POOLING,
    ) -> None:
        executor = FakeExecutor(
            num_blocks=num_blocks, vocab_size=vocab_size, step_s=step_s, sample=sample, pooling=pooling
        )
        info = ModelRuntimeInfo(pooling=pooling)
        self.text: ModelText = load_model_text(config)
        masker = bitmask_source(config, vocab_size) if masked else None
        self._make_client = client or (lambda: InProcessClient(config, executor, runtime_info=info, masker=masker))
        self._config = config
        self._more = more
        self._options: dict[str, Any] = {
            "developer_mode": developer_mode,
            "slow_reader_s": slow_reader_s,
            "traces": traces,
            "swaps": NoSwaps(),
        }
        self._up = threading.Event()
        self.http = httpx.Client(timeout=60)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.session = EngineSession(
            [self._make_client(), *self._more], self._config, self.text.eos_ids, special_tokens=self.text.special_tokens
        )
        self.app = create_app(self._config, self.session, self.text, **self._options)
        settings = uvicorn.Config(
            AnswerRecorder(self.app, ANSWERS),
            "127.0.0.1",
            0,
            log_level="critical",
            loop="uvloop",
            http=BoundedHttpProtocol,
        )
        self._uvicorn = uvicorn.Server(settings)
        self.loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._up.set()
        await serving

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *failure: object) -> None:
        self.http.close()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def in_loop(self, coroutine: Any, timeout: float = 60.0) -> Any:
        """Run something inside the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def limit_send_buffers(self, size: int) -> None:
        """Let the system take no more than some `size` bytes of what clients that connect from now on do not read."""
        self._uvicorn.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A request with JSON."""
        return self.http.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A request without a body."""
        return self.http.get(self.url + path, **options)

    def wait_ready(self) -> Server:
        """Return once work is taken."""
        self.in_loop(self.session.wait_ready())
        return self

    def assert_all_free(self) -> None:
        """Nothing is held, here or in the engine, as soon as what is in flight is over."""
        for _ in range(1_200):
            counts = self.get("/debug/counts").json()
            api, engine = counts["api"], counts["engine"]
            free = engine["free_blocks"] == engine["blocks"] and engine["free_slots"] == engine["slots"]
            if api["sequences"] == api["streams"] == engine["requests"] == 0 and free:
                return
            threading.Event().wait(0.05)
        raise AssertionError(counts)


@contextlib.contextmanager
def running(directory: Path, *, client: Callable[[], EngineClient] | None = None, **options: Any) -> Iterator[Server]:
    """A ready server; options of Server by name, all others are settings."""
    of_server = {
        name: options.pop(name)
        for name in ("step_s", "num_blocks", "vocab_size", "sample", "developer_mode", "masked", "traces", "pooling")
        if name in options
    }
    with Server(resolved(directory, **options), client, **of_server) as server:
        yield server.wait_ready()


@contextlib.contextmanager
def serving(model: Path, **settings: Any) -> Iterator[Server]:
    """A model that is served as `tiny` in fp32 by the real executor, in this process."""
    asked = {"dtype": "float32", "served_model_name": ("tiny",), "disable_log_stats": True, **settings}
    found = resolve(
        Config().with_values(**asked, model=str(model), responses_store_path=str(model.parent / "store.sqlite"))
    )
    config, clock, info = found.config, SystemClock(), build_model_runtime_info(found.config, found.spec)
    masker = bitmask_source(config, found.spec.vocab_size)

    def client() -> InProcessClient:
        return InProcessClient(config, build_executor(config, clock), clock, info, masker)

    with Server(config, client, vocab_size=found.spec.vocab_size) as server:
        yield server.wait_ready()


@contextlib.contextmanager
def prompts_sent(server: Server) -> Iterator[list[Any]]:
    """The prompts that the server gives to its engine meanwhile, in order."""
    sent: list[Any] = []
    add = server.session.add_request
    server.session.add_request = lambda prompts, *rest, **options: (  # type: ignore[method-assign]
        sent.extend(prompts),
        add(prompts, *rest, **options),
    )[1]
    try:
        yield sent
    finally:
        server.session.add_request = add  # type: ignore[method-assign]
