"""A rank on a CPU: runs the engine's plans on its part of the model.

All ranks get all plans, and each stage computes its layers. Rows are sampled in the last stage. The ranks of the first
stage are told the tokens, and wait for the tokens that a plan's rows read: the plans before say which, so no message
asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from quire.compute.collectives.delta import StageLinks, Stream
from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.collectives.layout import group_bytes, memory_bytes
from quire.compute.collectives.shared_memory import Ranks, shared_memory_collectives
from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.workers import Order, Plan, Result, TokenBitmasks
from quire.foundation.processes.launch import GroupEnds, RankLaunch, StageEnds
from quire.foundation.processes.shared_memory import SharedMemory
from quire.models.spec import spec_of
from quire.runtime.executor.message_ring import MessageReader, MessageWriter
from quire.runtime.executor.rank_links import max_unread, open_reader, open_writer
from quire.runtime.executor.rank_messages import Bitmasks, StepDone, Stop, ToRanks, fingerprint
from quire.runtime.worker.async_scheduling import SampledSteps
from quire.runtime.worker.kv_tensors import DENSE
from quire.runtime.worker.worker import Worker

if TYPE_CHECKING:
    from quire.runtime.executor.rank_process import EngineChannel


def run(config: Config, mesh: Mesh, own: RankLaunch, channel: EngineChannel, imported: float) -> None:
    """Load a part of the model, then run plans until Stop; `imported`: the seconds that importing this module took."""
    clock = SystemClock()
    spec = spec_of(config.model)
    memory = SharedMemory(memory_bytes(mesh, spec.vocab_size), own.memory_fd)
    began = clock.now()
    ranks = shared_memory_collectives(memory, mesh, spec.vocab_size, spins=own.spins, patience_s=own.patience_s)
    compiled = clock.now() - began  # it has the kernels loaded
    links = stage_links(own.stage, spec.hidden, DENSE[config.model.dtype])
    group = None if own.group is None else engine_group(own.group, mesh, own.spins, own.patience_s)
    worker = Worker(config, clock, None, mesh, ranks, links, engines=group)
    limits = worker.load(channel.agree)
    inbox: EngineChannel | GroupSteps = channel
    if group is not None:
        group.wait_until_all_serve()
        inbox = GroupSteps(channel, ranks, mesh.tp, group)
    steps = RankSteps(worker, mesh, own.stage)
    worker.orders.report_to(channel.send)
    startup = {"import": imported, **limits.startup}
    startup["kernels"] += compiled
    channel.send(msgspec.structs.replace(limits, startup=startup))
    while not isinstance(message := inbox.receive(), Stop):
        if isinstance(message, Bitmasks):
            continue  # the ranks that sample have asked for it
        if isinstance(message, Order):
            worker.orders.post(message)
            continue
        assert isinstance(message, Plan)
        said = steps.execute(message, channel.bitmasks)
        if (missing := ranks.missing) is not None:
            raise EngineDeadError(late(mesh.stage * mesh.tp + missing, mesh.size, message.step, own.patience_s))
        if group is not None:
            group.check()
        channel.send(said)
    if isinstance(inbox, GroupSteps):
        inbox.leave()
    worker.close()


def late(rank: int, ranks: int, step: int, seconds: float) -> str:
    """The message that says that others have waited for a rank in vain."""
    return f"Rank {rank} of {ranks} was stuck: in step {step} the others waited {seconds:g} s for it"


class SampledTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the last stage tells the first: of a step, how many tokens each sampled row gained, and which."""

    step: int
    counts: list[int]
    tokens: list[int]


class RankSteps:
    """Executes plans on one rank, with the ends of its links to other stages."""

    def __init__(self, worker: Worker, mesh: Mesh, ends: StageEnds) -> None:
        self._worker = worker
        self._mesh = mesh
        self._arrivals = (
            None if ends.tokens_in is None else TokenArrivals(open_reader(ends.tokens_in), worker, max_unread(mesh.pp))
        )
        self._tokens_out: MessageWriter | None = None if ends.tokens_out is None else open_writer(ends.tokens_out)

    def execute(self, plan: Plan, masks: Callable[[], TokenBitmasks]) -> Result | StepDone:
        """Run a step; returns what the rank tells the engine of it. One rank sends the result, the others of the last
        stage a fingerprint of it."""
        if self._arrivals is not None:
            self._arrivals.wait_for(plan)
        if not self._mesh.is_last:
            self._worker.execute(without_samples(plan))
            return StepDone(plan.step)
        result = self._worker.execute(plan, masks)
        if self._tokens_out is not None and plan.sampled_rows:
            self._tokens_out.write(msgspec.msgpack.encode(SampledTokens(plan.step, result.counts, result.tokens)))
        return result if self._mesh.tp_rank == 0 else StepDone(result.step, fingerprint(result))


class TokenArrivals:
    """Brings a rank of the first stage the tokens that were sampled: `link` has a SampledTokens for each step that
    samples, and tokens of `unread` steps may be left unread."""

    def __init__(self, link: MessageReader, worker: Worker, unread: int) -> None:
        self._link = link
        self._worker = worker
        self._unread = unread
        self._decoder = msgspec.msgpack.Decoder(SampledTokens)
        self._due: deque[tuple[int, list[int]]] = deque()  # step and slots
        self._sampled = SampledSteps()
        self._arrived = 0

    def wait_for(self, plan: Plan) -> None:
        """Wait for all tokens that were sampled for the plan's slots, and note which slots the plan samples for."""
        needed = self._sampled.read_by(plan)
        while self._arrived < needed or len(self._due) > self._unread:
            self._take()
        if plan.sampled_rows:
            self._due.append((plan.step, self._sampled.sampled_by(plan)))

    def _take(self) -> None:
        """Receive the tokens of the next step that samples."""
        sampled = self._decoder.decode(self._link.read())
        step, slots = self._due.popleft()
        assert sampled.step == step, f"tokens of step {sampled.step}, expected those of {step}"
        gained = [slot for slot, count in zip(slots, sampled.counts, strict=True) if count]
        self._worker.learn_tokens(gained, sampled.tokens)
        self._arrived = step


def without_samples(plan: Plan) -> Plan:
    """The plan as an earlier stage runs it: nothing is sampled or reported."""
    return msgspec.structs.replace(plan, sampled_rows=[], masked=[], prompt_logprobs_rows=[], pooled_rows=[])


class MessageSink:
    """Sends streams to the next stage."""

    def __init__(self, link: MessageWriter) -> None:
        self._link = link

    def send(self, stream: Stream) -> None:
        x, delta = stream.tensors()
        assert delta is not None, "a stage without blocks"
        self._link.write(_bytes(x) + _bytes(delta))


class MessageSource:
    """Receives streams [tokens, hidden] of this dtype from the stage before."""

    def __init__(self, link: MessageReader, hidden: int, dtype: torch.dtype) -> None:
        self._link = link
        self._hidden = hidden
        self._dtype = dtype

    def receive(self, tokens: int) -> Stream:
        both = torch.frombuffer(bytearray(self._link.read()), dtype=self._dtype)
        x, delta = both.view(2, tokens, self._hidden).unbind()
        return Stream(x, delta)


def stage_links(ends: StageEnds, hidden: int, dtype: torch.dtype) -> StageLinks:
    """A rank's links to the stages beside its own."""
    return StageLinks(
        None if ends.before is None else MessageSource(open_reader(ends.before), hidden, dtype),
        None if ends.after is None else MessageSink(open_writer(ends.after)),
    )


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


class GroupSteps:
    """Decides whether a rank that divides experts with other engines runs a step of its engine or a dummy step.

    All ranks of an engine do the same, for they meet within its steps, and the ranks of all engines meet in layers with
    experts. So before each step the `number` ranks of an engine agree: if all of them have the plan, they run it;
    otherwise some have come because another engine waits, and they run a dummy step first.
    """

    def __init__(self, inbox: EngineChannel, ranks: Ranks, number: int, group: EngineGroup) -> None:
        self._inbox = inbox
        self._ranks = ranks
        self._number = number
        self._group = group
        self._next: ToRanks | None = None

    def receive(self) -> ToRanks:
        """Take part in the steps of other engines until this engine's next message has come, and return the message.

        If it is a step, the other engines have been told that it begins.

        Raises:
            EngineDeadError: A rank of another engine did not come.
        """
        while True:
            message, self._next = self._next or self._inbox.poll(), None
            if message is None and not self._group.is_awaited:
                self._sleep()
            elif message is not None and not (isinstance(message, Plan) and message.slots):
                return message
            elif self._all_have(message):
                assert message is not None
                self._group.begin_step()
                return message
            else:
                self._next = message
                self._group.run_dummy_step()

    def leave(self) -> None:
        """Go on for the other engines after Stop, until they have stopped too."""
        self._group.leave()
        while not self._group.all_leave:
            if self._group.is_awaited:
                self._all_have(None)
                self._group.run_dummy_step()
            else:
                self._group.wait()

    def _all_have(self, message: ToRanks | None) -> bool:
        """Whether all ranks of this engine have a plan to run.

        Raises:
            EngineDeadError: One of them did not come.
        """
        if self._number == 1:
            return message is not None
        have = torch.tensor([0.0 if message is None else 1.0])
        self._ranks.all_reduce(have)
        if (missing := self._ranks.missing) is not None:
            raise EngineDeadError(
                f"Rank {missing} of {self._number} was stuck: before a step the others waited for it."
            )
        return bool(have == self._number)

    def _sleep(self) -> None:
        self._inbox.wait_beside(self._group.bell)
        self._group.silence()


def engine_group(ends: GroupEnds, mesh: Mesh, spins: int, patience_s: float) -> EngineGroup:
    """A rank's part in the group of engines; `spins` and `patience_s` as in shared_memory_collectives."""
    memory = SharedMemory(group_bytes(mesh), ends.memory_fd)
    everyone = Mesh(mesh.ep_rank, tp=mesh.ep)
    ranks = shared_memory_collectives(memory, everyone, 0, spins=spins, patience_s=patience_s)
    return EngineGroup(memory, mesh, ranks, ends.bells, patience_s)
