"""One API process in which models are swapped, over real sockets to engines without a model; the test is its
supervisor."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire import builtin
from quire.engine.adapter_registry import load_modules
from quire.engine.build import ModelRuntimeInfo
from quire.engine.client import ZmqPort
from quire.engine.core import EngineCore
from quire.engine.process import turn_until
from quire.errors import ConfigError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import EngineId
from quire.foundation.processes.launch import LaunchConfig, ModelReport, Report, SwapRequest, SwapStatus
from quire.foundation.processes.orders import DropModel, HoldRequests, OpenModel, Order, Reload, TellSwap
from quire.foundation.processes.pipe_lines import LineWriter
from quire.planning.auto_config import resolve
from quire.serving.api.model_swaps import ModelSwaps
from quire.serving.api.schemas.model_change import FIXED, ModelChange, check_reloadable
from quire.serving.app import create_app
from tests.api.server import Pace, uvicorn_server
from tests.executor.fake import FakeExecutor

VOCAB_SIZE = 4_096
FIRST_TOKEN = 300
"""That model 0 generates, and nothing else; model 1 the next one, and so on."""
WAIT_S = 60.0
HEADERS = {"Authorization": "Bearer a key"}


class EngineThread:
    """An engine of a model that says one token for ever."""

    def __init__(self, launch: LaunchConfig, pace: Pace) -> None:
        self._launch, self._pace, self._ends = launch, pace, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        config, clock, token = self._launch.config, SystemClock(), FIRST_TOKEN + self._launch.generation

        def say(*_: object) -> int:
            self._pace.wait()
            return token

        executor = FakeExecutor(256, vocab_size=VOCAB_SIZE, sample=say)
        port, limits = ZmqPort(Path(self._launch.directory), EngineId()), executor.start()
        adapters = load_modules(config.lora, executor.orders)
        core = EngineCore(config, limits, ModelRuntimeInfo(), executor, port, clock, None, None, adapters)
        turn_until(lambda: self._ends, core, clock, lambda pulse: None)
        executor.close()
        port.close()

    def end(self) -> None:
        self._ends = True
        self._thread.join(WAIT_S)


class Process:
    """An API process, its engines, and what it reports.

    Args:
        pace: Of its models; None: they are fast.

    Attributes:
        http: A client for it.
    """

    http: httpx.AsyncClient

    def __init__(self, directory: Path, *, pace: Pace | None = None, hold_s: float = 0.0, **settings: Any) -> None:
        asked = Config().with_values(
            model="quill", served_model_name=("m",), device="cpu", max_model_len=512, max_num_seqs=8,
            disable_log_stats=True, responses_store_path=str(directory / "store.sqlite"),
            **{"api_key": ("a key",), **settings},
        )  # fmt: skip
        self.config = resolve(asked).config
        self._directory, self._asked, self._pace = directory, asked, pace or Pace()
        if pace is None:
            self._pace.hurry()
        self._reports: list[Report] = []
        self._engines: dict[int, EngineThread] = {}
        orders_read, orders_write = os.pipe()
        self._orders = LineWriter(orders_write)
        launch = replace_launch(self._launch(0), orders_fd=orders_read, hold_s=hold_s)
        self.swaps = ModelSwaps(launch, self._reports.append, create_app)

    @asynccontextmanager
    async def serving(self, *, with_engine: bool = True) -> AsyncIterator[Process]:
        if with_engine:
            self.start_engine(0)
        self.swaps.start()
        async with (
            uvicorn_server(self.swaps.switch) as url,
            httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=WAIT_S) as self.http,
        ):
            if with_engine:
                await self.swaps.wait_ready()
            yield self
        for engine in self._engines.values():
            engine.end()
        self._orders.close()

    # --- as a supervisor --------------------------------------------------------------------------------------------

    def start_engine(self, generation: int) -> None:
        self._engines[generation] = EngineThread(self._launch(generation), self._pace)

    def order(self, order: Order) -> None:
        self._orders.send(msgspec.json.encode(order))

    def open(self, generation: int, config: Config | None = None, drain_timeout: float = WAIT_S) -> None:
        launch = self._launch(generation)
        self.order(OpenModel(replace_launch(launch, config=config or launch.config), drain_timeout))

    async def reported(self, kind: type[Report] = ModelReport) -> Any:
        """The next report of this kind."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for report in self._reports:
                    if isinstance(report, kind):
                        self._reports.remove(report)
                        return report
                await asyncio.sleep(0.01)

    def _launch(self, generation: int) -> LaunchConfig:
        directory = self._directory / str(generation)
        directory.mkdir(exist_ok=True)
        return LaunchConfig(self.config, str(directory), generation=generation, asked=self._asked)

    # --- as clients -------------------------------------------------------------------------------------------------

    async def ask(self, tokens: int = 3) -> httpx.Response:
        return await self.http.post("/v1/completions", json={**BODY, "max_tokens": tokens})

    async def who_answers(self) -> int:
        answer = await self.ask()
        assert answer.status_code == 200, answer.text
        return model_of(answer.json()["choices"][0]["token_ids"])


BODY: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def replace_launch(launch: LaunchConfig, **changes: Any) -> LaunchConfig:
    return LaunchConfig(**{**{name: getattr(launch, name) for name in launch.__struct_fields__}, **changes})


def model_of(tokens: list[int]) -> int:
    """The generation of the model that said all of these."""
    (token,) = set(tokens)
    return token - FIRST_TOKEN


class Stream:
    """An answer that is read in the background."""

    def __init__(self, process: Process, tokens: int) -> None:
        self.lines: list[str] = []
        self._begun = asyncio.Event()
        self._task = asyncio.create_task(self._read(process, tokens))

    async def begun(self) -> Stream:
        await self._begun.wait()
        return self

    async def end(self) -> list[str]:
        await self._task
        return self.lines

    async def _read(self, process: Process, tokens: int) -> None:
        body = {**BODY, "max_tokens": tokens, "stream": True}
        async with process.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self.lines.append(line[6:])
                    self._begun.set()


def tokens_of(lines: list[str]) -> list[int]:
    return [token for line in lines[:-1] for token in json.loads(line)["choices"][0]["token_ids"]]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_beside_open_answers_end_in_the_old_model_and_new_ones_come_from_the_new(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path, pace=(pace := Pace())).serving() as process:
            stream = await Stream(process, 400).begun()
            process.start_engine(1)
            process.open(1)
            assert await process.reported() == ModelReport(1, "served")
            assert await process.who_answers() == 1
            assert len(process.swaps.switch.others) == 1
            pace.hurry()
            lines = await stream.end()
            assert tokens_of(lines) == [FIRST_TOKEN] * 400
            assert lines[-1] == "[DONE]"
            assert await process.reported() == ModelReport(0, "released")
            assert await process.who_answers() == 1
            assert process.swaps.switch.others == []

    run(test)


def test_after_new_requests_wait_for_the_new_model(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path, pace=(pace := Pace())).serving() as process:
            stream = await Stream(process, 400).begun()
            process.order(HoldRequests(WAIT_S, WAIT_S))
            while not process.swaps.switch.holds:
                await asyncio.sleep(0.01)
            waiting = [asyncio.create_task(process.who_answers()) for _ in range(5)]
            while process.swaps.switch.num_waiting < 5:
                await asyncio.sleep(0.01)
            pace.hurry()
            assert tokens_of(await stream.end()) == [FIRST_TOKEN] * 400
            assert await process.reported() == ModelReport(0, "released")
            ready, health = await process.http.get("/ready"), await process.http.get("/health")
            assert (ready.status_code, ready.json()["reason"]) == (503, "another model is being loaded")
            assert (health.status_code, health.json()["state"]) == (200, "swapping")
            assert (await process.http.get("/v1/models")).status_code == 200
            assert (
                'quire:requests_waiting_for_model{engine="0",model_name="m"} 5.0'
                in (await process.http.get("/metrics")).text
            )
            assert not any(task.done() for task in waiting)
            process.start_engine(1)
            process.open(1)
            assert await process.reported() == ModelReport(1, "served")
            assert await asyncio.gather(*waiting) == [1] * 5
            assert (await process.http.get("/ready")).status_code == 200

    run(test)


def test_who_waits_too_long_is_told_when_to_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            process.order(HoldRequests(WAIT_S, 0.2))
            await process.reported()
            answer = await process.ask()
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
            assert "Another model is being loaded" in answer.json()["error"]["message"]
            process.start_engine(1)
            process.open(1)
            await process.reported()
            assert await process.who_answers() == 1

    run(test)


def test_what_is_open_for_too_long_is_ended_with_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path, pace=Pace()).serving() as process:
            stream = await Stream(process, 400).begun()
            process.start_engine(1)
            process.open(1, drain_timeout=0.2)
            assert await process.reported() == ModelReport(1, "served")
            assert await process.reported() == ModelReport(0, "released")
            assert "Another model is being loaded" in (await stream.end())[-2]
            assert await process.who_answers() == 1

    run(test)


def test_a_model_that_is_dropped_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            process.open(1)  # whose engine does not come
            while not process.swaps.switch.others:
                await asyncio.sleep(0.01)
            process.order(DropModel(1))
            while process.swaps.switch.others:
                await asyncio.sleep(0.01)
            assert await process.who_answers() == 0

    run(test)


def test_a_model_whose_text_cannot_be_read_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            broken = tmp_path / "broken"
            broken.mkdir()
            (broken / "tokenizer.json").write_text("{")
            config = process.config
            process.open(1, replace(config, model=replace(config.model, model=str(broken), tokenizer=str(broken))))
            report = await process.reported()
            assert (report.generation, report.state) == (1, "refused")
            assert "tokenizer.json" in report.message
            assert await process.who_answers() == 0

    run(test)


def test_a_drain_ends_a_swap_and_refuses_who_waits(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            process.order(HoldRequests(WAIT_S, WAIT_S))
            await process.reported()
            process.open(1)  # whose engine does not come
            waiting = asyncio.create_task(process.ask())
            while not process.swaps.switch.num_waiting:
                await asyncio.sleep(0.01)
            assert await process.swaps.drain(WAIT_S)
            assert (await waiting).status_code == 503
            answer = await process.http.post("/admin/model", json={})
            assert answer.status_code == 503

    run(test)


def test_a_process_that_is_started_while_its_model_loads_lets_requests_wait(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path, hold_s=WAIT_S).serving(with_engine=False) as process:
            waiting = asyncio.create_task(process.who_answers())
            while not process.swaps.switch.num_waiting:
                await asyncio.sleep(0.01)
            process.start_engine(0)
            assert await process.reported() == ModelReport(0, "served")
            assert await waiting == 0

    run(test)


def test_a_model_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            old = weakref.ref(process.swaps.switch.current.session)
            assert await process.who_answers() == 0
            for generation in (1, 2):
                process.start_engine(generation)
                process.open(generation)
                assert (await process.reported()).state == "served"
                assert (await process.reported()).state == "released"
            while process.swaps.switch.others:
                await asyncio.sleep(0.01)
            assert await process.who_answers() == 2  # a connection keeps its last request
            gc.unfreeze()
            gc.collect()
            assert old() is None

    run(test)


def test_a_change_is_checked_before_anything_happens(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            for body, param, word in (
                ({"model": "/nowhere"}, None, "'/nowhere' is neither a directory"),
                ({"port": 9}, "port", "not a known field"),
                ({"max_model_len": 10**6}, "max_model_len", "2..2048"),
                ({"mode": "over"}, "mode", "'auto', 'beside' or 'after'"),
                ({"drain_timeout": -1}, "drain_timeout", "greater than or equal to 0"),
            ):
                answer = await process.http.post("/admin/model", json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), error
                assert word in error["message"]
            no_key = await process.http.post("/admin/model", json={}, headers={"Authorization": ""})
            assert no_key.status_code == 401

    run(test)


def test_a_swap_is_asked_for_and_followed(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            asked = {"model": str(builtin.path("quill_draft")), "mode": "after", "max_num_seqs": 4, "wait": True}
            answer = asyncio.create_task(process.http.post("/admin/model", json=asked))
            request = await process.reported(SwapRequest)
            assert (request.mode, request.hold_timeout, request.drain_timeout) == ("after", 120.0, 30.0)
            assert request.config.model.served_model_name == ("m",)
            assert request.asked.scheduler.max_num_seqs == request.config.scheduler.max_num_seqs == 4
            status = SwapStatus(1, "m", "after", "draining")
            process.order(TellSwap(status))
            while process.swaps.status is None:
                await asyncio.sleep(0.01)
            refused = await process.http.post("/admin/model", json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "swap_in_progress")
            shown = (await process.http.get("/admin/model")).json()
            assert (shown["model"], shown["generation"], shown["swap"]["phase"]) == ("m", 0, "draining")
            assert not answer.done()
            process.order(TellSwap(SwapStatus(1, "m", "after", "failed", "It does not fit.", 2.5)))
            document = (await answer).json()
            assert (document["swap"]["phase"], document["swap"]["reason"]) == ("failed", "It does not fit.")
            metrics = (await process.http.get("/metrics")).text
            assert 'quire:model_swaps_total{engine="0",model_name="m",outcome="failed"} 1.0' in metrics

    run(test)


def test_sighup_is_a_change_to_what_the_settings_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Process(tmp_path).serving() as process:
            process.order(Reload(process._asked.with_values(port=9)))
            while "--port cannot change" not in caplog.text:
                await asyncio.sleep(0.01)
            process.order(Reload(process._asked.with_values(max_num_seqs=3)))
            request = await process.reported(SwapRequest)
            assert request.config.scheduler.max_num_seqs == 3

    run(test)


def test_without_a_key_there_is_no_such_route(tmp_path: Path) -> None:
    async def test() -> None:
        async with Process(tmp_path, api_key=()).serving() as process:
            assert (await process.http.post("/admin/model", json={})).status_code == 404
            assert (await process.http.get("/admin/model")).status_code == 404

    run(test)


def test_the_documentation_has_every_field_and_every_fixed_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "model-swap.md").read_text()
    assert [name for name in ModelChange.model_fields if f"`{name}`" not in page] == []
    flags = [f"--{name.replace('_', '-')}" for name in FIXED if not name.startswith(("host", "port", "ssl"))]
    assert [flag for flag in flags if f"`{flag}`" not in page] == []


def test_settings_of_the_old_model_mean_nothing_to_another() -> None:
    asked = Config().with_values(
        model="a", tokenizer="its own", max_model_len=100, served_model_name=("prod",), max_num_seqs=7
    )
    same = ModelChange(dtype="float32").applied_to(asked)
    assert same == asked.with_values(dtype="float32")
    other = ModelChange(model="b", max_model_len=50, served_model_name="c").applied_to(asked)
    assert other == Config().with_values(model="b", max_model_len=50, served_model_name=("c",), max_num_seqs=7)
    assert ModelChange(model="b").applied_to(asked).model.served_model_name == ("prod",)


def test_settings_of_the_processes_stay() -> None:
    check_reloadable(Config(), Config().with_values(api_key=("another",), model="b"))
    with pytest.raises(ConfigError, match="--host, --port cannot change"):
        check_reloadable(Config(), Config().with_values(host="a", port=9))
