"""Another model takes the place of the one that is served: what is started and ended, in which order.

Mode `beside`: loading → draining → stopping. Mode `after`: draining → stopping → loading, and restoring if the new
model does not start, so the old one is started again. The API process keeps the requests, and tells how far it is by
ModelReports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.foundation.clock import Clock
from quire.foundation.processes.child_process import Child
from quire.foundation.processes.launch import STOP_ENGINE, ModelReport, SwapPhase, SwapRequest, SwapStatus
from quire.foundation.processes.orders import DropModel, HoldRequests, TellSwap
from quire.serving.supervisor.announce import print_log
from quire.serving.supervisor.children import Children
from quire.serving.supervisor.lives import ModelEngines

STOP_ENGINES_S = 5.0
"""Seconds that engines may take to end."""


@dataclass
class _Swap:
    """A swap that proceeds.

    `new` is served while its engines run: in the end the old model again, if the other did not start; `why` tells why.
    At `stop_by`, old engines that still run are killed.
    """

    request: SwapRequest
    old: ModelEngines
    began: float
    new: ModelEngines | None = None
    why: str = ""
    stop_by: float = field(default=float("inf"))

    @property
    def beside(self) -> bool:
        """Whether the old model serves until the new one does."""
        return self.request.mode == "beside"


class ModelSwap:
    """Swaps models, one at a time. `forget` is called with an engine before it is ended, so that nobody waits for it
    any more. `status` is that of the present swap, or of the last one."""

    def __init__(self, children: Children, forget: Callable[[Child], None], clock: Clock) -> None:
        self._children = children
        self._forget = forget
        self._clock = clock
        self._swap: _Swap | None = None
        self._stopped = False
        self.status: SwapStatus | None = None

    @property
    def phase(self) -> SwapPhase | None:
        return None if self._swap is None or self.status is None else self.status.phase

    # --- what happens -----------------------------------------------------------------------------------------------

    def begin(self, request: SwapRequest) -> None:
        """Begin a swap, unless one proceeds or the server drains, and tell the API process."""
        if self._swap is not None or self._stopped:
            self._tell()
            return
        swap = self._swap = _Swap(request, self._children.model, self._clock.now())
        number = 1 if self.status is None else self.status.number + 1
        name, mode = request.config.model.served_model_name[0], request.mode
        print_log(f"model swap {number}: {name}, {mode} the one that is served")
        for reason in request.reasons:
            print_log(f"  {reason}")
        self.status = SwapStatus(number, name, mode, "loading" if swap.beside else "draining")
        if swap.beside:
            self._load(swap)
        else:
            self._hold(swap)
        self._tell()

    def reported(self, report: ModelReport) -> None:
        """Take in how far the API process is with a model."""
        swap = self._swap
        if swap is None:
            return
        is_new = swap.new is not None and report.generation == swap.new.generation
        match report.state:
            case "served" if is_new and self.phase in ("loading", "restoring"):
                self._served(swap)
            case "released" if report.generation == swap.old.generation and self.phase == "draining":
                self._stop_old(swap)
            case "refused" if is_new:
                self._not_served(swap, report.message)

    def engine_died(self, engine: Child, model: ModelEngines) -> bool:
        """Take in the death of an engine. Returns whether the swap deals with it, so nobody replaces the engine."""
        swap = self._swap
        if swap is None:
            return False
        if self.phase == "stopping" and model is swap.old:
            self.tick()
            return True
        if self._stopped and model is not self._children.model:
            return not self._children.was_ready(engine.name)
        if model is not swap.new or self.phase != "loading":
            return False
        self._not_served(swap, engine.cause_of_death())
        return True

    def api_started(self) -> None:
        """Tell a new API process, which has no requests, what it has to know about the swap."""
        swap = self._swap
        if swap is not None and not self._stopped:
            match self.phase:
                case "loading" if swap.beside and swap.new is not None:
                    self._children.open_model(swap.new, swap.request.drain_timeout)
                case "draining" if swap.beside:
                    self._stop_old(swap)  # its connections were cut, and nobody can use it any more
                case "draining" | "stopping" if not swap.beside:
                    self._hold(swap)
        self._tell()

    def tick(self) -> None:
        """Do what is due by now."""
        swap = self._swap
        if swap is None or self._stopped or self.phase != "stopping":
            return
        if self._children.all_gone(swap.old) or self._clock.now() >= swap.stop_by:
            self._remove(swap.old)
            if swap.beside:
                self._end(swap)
            else:
                self._load(swap)

    def stop(self) -> None:
        """Begin nothing more, since the server drains. The served model goes on until open requests have ended."""
        self._stopped = True

    # --- the steps of a swap ----------------------------------------------------------------------------------------

    def _load(self, swap: _Swap) -> None:
        """Start the new model's engines, or the old model's again."""
        phase: SwapPhase = "restoring" if swap.why else "loading"
        if swap.why:
            launch = swap.old.launch
            swap.new = self._children.add_model(launch.config, launch.asked or launch.config)
        else:
            swap.new = self._children.add_model(swap.request.config, swap.request.asked)
        if not swap.beside:  # no other model serves: an API process that starts now begins with this one
            self._children.model, self._children.hold_s = swap.new, swap.request.hold_timeout
        self._children.open_model(swap.new, swap.request.drain_timeout)
        self._move_to(phase)

    def _served(self, swap: _Swap) -> None:
        """Take in that new requests go to the new model."""
        assert swap.new is not None
        self._children.model, self._children.hold_s = swap.new, 0.0
        if swap.beside:
            self._move_to("draining")
        else:
            self._end(swap)

    def _hold(self, swap: _Swap) -> None:
        self._children.tell(HoldRequests(swap.request.drain_timeout, swap.request.hold_timeout))

    def _stop_old(self, swap: _Swap) -> None:
        for engine in swap.old.children:
            if self._children.is_ready(engine):
                engine.signal(STOP_ENGINE)
            else:
                engine.kill()
        swap.stop_by = self._clock.now() + STOP_ENGINES_S
        self._move_to("stopping")

    def _not_served(self, swap: _Swap, why: str) -> None:
        """Take in that the new model cannot be served, and return to the old one."""
        assert swap.new is not None
        if swap.why:  # nor can the old one: an API process that cannot start says why, and ends the server
            for api in self._children.apis.children:
                api.kill(why)
            return
        swap.why = " ".join(why.split())
        print_log(f"the model was not swapped: {swap.why}")
        self._children.tell(DropModel(swap.new.generation))
        self._remove(swap.new)
        swap.new = None
        if swap.beside:
            self._end(swap)
        elif not self._stopped:
            self._load(swap)

    def _remove(self, model: ModelEngines) -> None:
        for engine in model.children:
            self._forget(engine)
        self._children.remove_model(model)

    def _end(self, swap: _Swap) -> None:
        took = self._clock.now() - swap.began
        self._swap = None
        assert self.status is not None
        served = self._children.model.launch.config.model.served_model_name[0]
        print_log(
            f"model swap {self.status.number} {'failed' if swap.why else 'done'} in {took:.1f} s: {served} is served"
        )
        self.status = msgspec.structs.replace(
            self.status, phase="failed" if swap.why else "done", reason=swap.why, seconds=round(took, 1)
        )
        self._tell()

    def _move_to(self, phase: SwapPhase) -> None:
        assert self.status is not None
        reason = self._swap.why if self._swap is not None else ""
        self.status = msgspec.structs.replace(self.status, phase=phase, reason=reason)
        self._tell()

    def _tell(self) -> None:
        if self.status is not None:
            self._children.tell(TellSwap(self.status))
