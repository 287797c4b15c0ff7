"""Commands to the engine, each answered by exactly one Done, at once or when what it asks for has happened.

Owns which answers are due, and the pause. Knows nothing about steps and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from quire.engine.adapter_registry import AdapterRegistry
from quire.engine.port import Port
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import CLIENT_SHIFT, Adapter, Control, PauseMode
from quire.runtime.executor.executor import Orders
from quire.scheduling.scheduler.scheduler import Scheduler

PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
_RESUME = "the resume"


class Pausing:
    """The pause of one engine. New requests are taken meanwhile, and wait.

    Attributes:
        mode: How the engine is paused; empty if it is not.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: list[int] = []  # requests that await the resume; some may be over
        self.mode: Literal["", PauseMode] = ""

    @property
    def frozen(self) -> bool:
        """Whether no step may be planned at all."""
        return self.mode == "keep"

    @property
    def reached(self) -> bool:
        """Whether the engine is paused and nothing runs any more."""
        going_on = not self.frozen and (self._scheduler.moves_blocks or not self._scheduler.only_awaiting)
        return bool(self.mode) and not self._scheduler.steps_in_flight and not going_on

    def pause(self, mode: PauseMode) -> list[int]:
        """Pause, or change the mode of a pause. Returns the requests that are to be aborted."""
        self.mode = mode
        if mode == "abort":
            return [request.id for request in self._scheduler.requests()]
        if mode == "wait":
            self._held += self._scheduler.hold_new(_RESUME)
        return []

    def awaits(self, request_id: int) -> tuple[str, ...]:
        """What a new request awaits because of the pause."""
        if not self.mode:
            return ()
        self._held.append(request_id)
        return (_RESUME,)

    def resume(self) -> None:
        """Let all requests go on."""
        self.mode = ""
        for request_id in self._held:
            self._scheduler.arrived(request_id, _RESUME)
        self._held.clear()


class Commands:
    """Answers what API processes command.

    Args:
        abort: Ends a request.
        loader: Loads adapters; None if no adapters are served.
        frame: Makes the live picture for a client (its number) that has seen a frame of this number, if there is a
            picture.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        port: Port,
        abort: Callable[[int], object],
        orders: Orders | None = None,
        adapters: Sequence[Adapter] = (),
        frame: Callable[[int, int], dict[str, Any]] | None = None,
    ) -> None:
        self.pausing = Pausing(scheduler)
        self._scheduler = scheduler
        self._port = port
        self._abort = abort
        self._frame = frame
        self._drains: list[Control] = []  # not answered yet, like pauses
        self._pauses: list[Control] = []
        self.adapters = None if orders is None else AdapterRegistry(orders, adapters, self._answer)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return bool(self._drains)

    def receive(self, message: Control) -> None:
        """Do what a command says."""
        match message.action.split(":"):
            case ["drain"]:
                self._drains.append(message)
            case ["pause", mode] if mode in PAUSE_MODES:
                for request_id in self.pausing.pause(mode):
                    self._abort(request_id)
                self._pauses.append(message)
            case ["resume"]:
                self.pausing.resume()
                for pause in self._pauses:
                    self._answer(pause, error="The engine was resumed before nothing ran any more")
                self._pauses.clear()
                self._answer(message)
            case ["load_adapter" | "unload_adapter"]:
                if self.adapters is None:
                    self._answer(message, error="This engine serves no adapters: start it with --enable-lora")
                else:
                    self.adapters.receive(message)
            case ["is_paused"]:
                self._answer(message, {"paused": bool(self.pausing.mode)})
            case ["counts"]:
                self._answer(message, counts(self._scheduler))
            case ["frame"] if self._frame is not None:
                self._answer(message, self._frame(message.id >> CLIENT_SHIFT, int(message.value.get("seen", 0))))
            case ["reset_prefix_cache"]:
                self._scheduler.reset_prefix_cache()
                self._answer(message)
            case _:
                self._answer(message, error=f"unknown action '{message.action}'")

    def answer_due(self) -> None:
        """Answer commands whose condition holds now; called once a turn."""
        if not self._scheduler.has_work:
            self._answer_all(self._drains)
        if self.pausing.reached:
            self._answer_all(self._pauses)

    def _answer_all(self, controls: list[Control]) -> None:
        for control in controls:
            self._answer(control)
        controls.clear()

    def _answer(self, message: Control, value: dict[str, Any] | None = None, error: str = "") -> None:
        self._port.send(message.id >> CLIENT_SHIFT, Done(message.id, value or {}, error))


def counts(scheduler: Scheduler) -> dict[str, int]:
    """How much is held and how much is free, for leak tests."""
    states = scheduler.states
    return {
        "requests": len(list(scheduler.requests())),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "in_flight": scheduler.steps_in_flight,
        "moves": 0 if scheduler.tier is None else scheduler.tier.num_orders,
        "free_slots": scheduler.num_free_slots,
        "slots": scheduler.num_slots,
        "free_blocks": scheduler.pool.num_free,
        "blocks": scheduler.pool.num_blocks,
        "free_host_blocks": scheduler.host.num_free,
        "host_blocks": scheduler.host.num_blocks,
        "preemptions": scheduler.stats.preemptions,
        **({} if states is None else {"free_states": states.pool.num_free, "states": states.pool.num_blocks}),
    }
