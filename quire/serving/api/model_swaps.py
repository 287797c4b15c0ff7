"""The API process's part in a swap of models: it checks what is asked for, and obeys the supervisor's orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from quire.engine.metrics.server_stats import ServerStats
from quire.errors import QuireError, RequestError, SetupError, SwapInProgressError, UnavailableError
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Ready
from quire.foundation.processes import garbage
from quire.foundation.processes.launch import LaunchConfig, ModelReport, SendReport, SwapRequest, SwapStatus
from quire.foundation.processes.orders import DropModel, HoldRequests, OpenModel, Order, Reload, TellSwap, read_orders
from quire.foundation.processes.pipe_lines import LineReader
from quire.serving.api.model_switch import MakeApp, ModelSwitch, ServedModel, make_served_model
from quire.serving.api.request_traces import RequestTraces
from quire.serving.api.schemas.model_change import HOLD_TIMEOUT_S, ModelChange, check_reloadable
from quire.text.model_text import load_model_text

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""Seconds that the supervisor may take to begin a swap."""


class ModelSwaps:
    """Swaps models, one at a time. `serve_until_end` starts it, waits for it and drains it.

    `switch` is the application of this process; `status` is the present swap's or the last one's, None before the
    first.
    """

    def __init__(
        self, launch: LaunchConfig, report: SendReport, make_app: MakeApp, traces: RequestTraces | None = None
    ) -> None:
        self._launch = launch
        self._report = report
        self._make_app = make_app
        self._traces = traces
        self._orders = LineReader(launch.orders_fd) if launch.orders_fd >= 0 else None
        self._preparing = self._draining = False
        self._changed = asyncio.Event()
        self._opening: tuple[int, asyncio.Task[None]] | None = None  # the model's generation, too
        self._tasks: set[asyncio.Task[None]] = set()
        self.status: SwapStatus | None = None
        self.switch = ModelSwitch(self._make(launch))

    @property
    def served(self) -> Config:
        """Settings of the served model."""
        return self.switch.current.launch.config

    def document(self) -> dict[str, Any]:
        """Describe what is served, and how far a swap is."""
        model, swap = self.switch.current, None
        if self.status is not None:
            swap = msgspec.to_builtins(self.status)
            old = sum(other.session.num_sequences for other in self.switch.others)
            swap["open_requests"] = model.session.num_sequences if self.switch.holds else old
            swap["waiting_requests"] = self.switch.num_waiting
        names = self.served.model.served_model_name
        return {
            "object": "model_swap",
            "model": names[0],
            "served_model_name": list(names),
            "root": self.served.model.model,
            "generation": model.generation,
            "state": model.session.state,
            "swap": swap,
        }

    async def begin(self, change: ModelChange) -> None:
        """Check a change, and hand it to the supervisor, which begins the swap. Raises SwapInProgressError during
        another swap, RequestError if the model cannot be served, and UnavailableError while the server starts or ends.
        """
        asked = self.switch.current.launch.asked or self.served
        await self._begin(lambda: change.applied_to(asked), change)

    async def wait_end(self) -> None:
        """Wait until no swap is in progress."""
        while self.status is not None and not self.status.ended:
            await self._changed.wait()

    async def _begin(self, settings: Callable[[], Config], change: ModelChange) -> None:
        if why := self.served.server.keeps_model:
            raise RequestError(f"{why[0].upper()}{why[1:]}.")
        if self._preparing or (self.status is not None and not self.status.ended):
            raise SwapInProgressError(
                "A swap of models proceeds: GET /admin/model says how far it is. Wait for its end."
            )
        if self._orders is None or self._draining or self.switch.current.session.state != "ready":
            raise UnavailableError("Models are swapped while the server is ready. Ask again in a few seconds.")
        self._preparing = True
        try:
            request = await asyncio.to_thread(self._prepare, settings, change)
            if self._draining:
                raise UnavailableError("The server is shutting down: nothing is swapped.")
            number = 0 if self.status is None else self.status.number
            self._report(request)
            async with asyncio.timeout(ANSWER_S):
                while self.status is None or self.status.number == number:
                    await self._changed.wait()
        except SetupError as error:
            raise RequestError(error.message, param=error.param) from error
        except TimeoutError:
            raise UnavailableError("The supervisor has not begun the swap. Ask again in a few seconds.") from None
        finally:
            self._preparing = False

    def _prepare(self, settings: Callable[[], Config], change: ModelChange) -> SwapRequest:
        """Plan a swap. Runs in a thread, because files are read, and downloaded if need be."""
        from quire.planning.swap_plan import plan_swap  # with all families, which a start need not wait for

        asked = settings()
        plan = plan_swap(self.served, asked, change.mode)
        config = plan.resolved.config
        _ = load_model_text(config).chat_template  # what is broken is said before anything has happened
        drain = config.server.shutdown_timeout if change.drain_timeout is None else change.drain_timeout
        reasons = (*plan.resolved.reasons, f"swap        {plan.mode}: {plan.reason}")
        return SwapRequest(asked, config, plan.mode, drain, change.hold_timeout, reasons)

    def start(self) -> None:
        """Begin to receive messages and orders; called in the event loop. More calls do nothing."""
        if self._launch.hold_s:
            self.switch.hold(self._launch.hold_s)
            self._do(self._serve_first(self.switch.current))
        self.switch.current.session.start()
        if self._orders is not None:
            asyncio.get_running_loop().add_reader(self._orders.fd, self._read_orders)
            self._read_orders()

    async def wait_ready(self) -> Ready:
        """Wait until the served model's engines are ready, and return what they can do."""
        return await self.switch.current.session.wait_ready()

    async def wait_dead(self) -> None:
        """Wait until an engine of the served model is dead and is not replaced."""
        await self.switch.wait_dead()

    async def drain(self, timeout: float) -> bool:
        """Stop swapping, and drain all models. Returns whether all open requests ended by themselves."""
        self._draining = True
        if self._orders is not None:
            asyncio.get_running_loop().remove_reader(self._orders.fd)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        return await self.switch.drain(timeout)

    def _read_orders(self) -> None:
        assert self._orders is not None
        for order in read_orders(self._orders):
            self.obey(order)

    def obey(self, order: Order) -> None:
        """Do what the supervisor says; called in the event loop."""
        match order:
            case TellSwap(status):
                self._learn(status)
            case Reload(asked):
                self._do(self._reload(asked))
            case HoldRequests():
                self.switch.hold(order.hold_timeout)
                self._do(self._release(self.switch.current, order.drain_timeout))
            case OpenModel(launch) if launch.generation != self.switch.current.generation:
                self._opening = launch.generation, self._do(self._open(order))
            case DropModel(generation) if self._opening is not None and self._opening[0] == generation:
                self._opening[1].cancel()

    def _learn(self, status: SwapStatus) -> None:
        """Record a swap's status. A process that was started later does not count a swap that has ended."""
        counts = self.switch.current.session.stats.swaps
        if status.ended and counts.proceeds:
            counts.done += status.phase == "done"
            counts.failed += status.phase == "failed"
        counts.proceeds = not status.ended
        self.status = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def _reload(self, asked: Config) -> None:
        """On SIGHUP, swap to what the settings say now; the files that they name may have changed, too."""
        before = self.switch.current.launch.asked or self.served

        def settings() -> Config:
            check_reloadable(before, asked)
            return asked

        try:
            await self._begin(settings, ModelChange(hold_timeout=HOLD_TIMEOUT_S))
        except QuireError as error:
            logger.warning("SIGHUP: nothing has changed: %s", error.message)

    async def _open(self, order: OpenModel) -> None:
        """Serve a model once its engines are ready; until then it is one of the others."""
        switch, generation = self.switch, order.launch.generation
        held = switch.holds
        try:
            model = await self._make_beside(order.launch)
        except QuireError as error:
            self._report(ModelReport(generation, "refused", error.message))
            return
        switch.others.append(model)
        try:
            await model.open()
            await model.session.wait_ready()
        except QuireError as error:
            self._report(ModelReport(generation, "refused", error.message))
        finally:
            if model.session.ready is None:  # dropped, too
                await switch.forget(model)
        if model not in switch.others:
            return
        before = switch.serve(model)
        switch.let_in()
        self._report(ModelReport(generation, "served"))
        if not held:
            await before.release(order.drain_timeout)
            self._report(ModelReport(before.generation, "released"))
        await switch.forget(before)
        garbage.begin_anew()

    async def _release(self, model: ServedModel, timeout: float) -> None:
        """Let the served model's requests end before it has a successor. New requests wait meanwhile."""
        await model.release(timeout)
        self._report(ModelReport(model.generation, "released"))

    async def _serve_first(self, model: ServedModel) -> None:
        """Let requests in once the model is ready, in a process that was started while its model is loaded."""
        try:
            await model.session.wait_ready()
        except QuireError:
            return  # the supervisor knows
        self.switch.let_in()
        self._report(ModelReport(model.generation, "served"))

    def _make(self, launch: LaunchConfig, before: ServerStats | None = None) -> ServedModel:
        return make_served_model(launch, self._report, self._make_app, self._traces, before, self)

    async def _make_beside(self, launch: LaunchConfig) -> ServedModel:
        """Make a model in a thread, because files are read. If the caller is cancelled, the model is closed."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, launch, self.switch.current.session.stats))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await (await making).close()
            raise

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A swap of models goes no further.", exc_info=error)
