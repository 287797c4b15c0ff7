"""One rank's part of `test_stage_links.py`, or of a measurement.

    python -m tests.gpu.stage_links RANK 2 DIRECTORY WHAT

Two stages, a card each. WHAT is `check` or `time`. Ranks exchange what they offer through files of the directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire.foundation.config import environment

if __name__ == "__main__":
    environment.number_gpus_by_pci_bus()
    environment.show_gpu_of_rank_first(int(sys.argv[1]), int(sys.argv[2]))

import torch
from torch import Tensor

from quire.compute.collectives.card_stage_links import CardStageLinks, StreamSize
from quire.compute.collectives.delta import Stream
from quire.compute.mesh import Mesh
from quire.runtime.worker.async_scheduling import max_in_flight
from tests.gpu.rank_sums import FileExchange, graph_of

HIDDEN, SLOTS = 4_096, 513
SIZES = (1, 32, 61, 700)
"""Tokens of streams: of less than a tile a program, and of several."""
STEPS = 20_000
AHEAD = max_in_flight(2) - 1
"""Steps that the first stage may be ahead of the tokens that it has taken."""
PLACES = 251


def values(step: Tensor, tokens: int, part: int) -> Tensor:
    """[tokens, HIDDEN] bf16 of a step's x or delta, that no other step near it has."""
    places = torch.arange(tokens * HIDDEN, device="cuda") % PLACES
    return ((places + step * (part + 1)) % PLACES).to(torch.bfloat16).view(tokens, HIDDEN)


class FirstStage:
    """Sends streams, and takes tokens.

    Args:
        links: Of its rank.
    """

    def __init__(self, links: CardStageLinks) -> None:
        self._links = links
        self._step = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._last = torch.zeros(SLOTS, dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        links.begin(self._step)
        self._graphs = {tokens: graph_of(lambda tokens=tokens: self._send(tokens)) for tokens in SIZES}
        links.take_tokens(self._last, 0)
        self._step.zero_()

    def run(self, step: int) -> None:
        taken = max(0, step - AHEAD)
        self._links.take_tokens(self._last, taken)
        self.wrong += ((self._last < taken) | (self._last >= step)).sum() * (taken > 0)
        self._step.fill_(step)
        self._graphs[SIZES[step % len(SIZES)]].replay()

    def _send(self, tokens: int) -> None:
        self._links.send(Stream(values(self._step, tokens, 0), values(self._step, tokens, 1)))


class LastStage:
    """Receives streams, and sends each step's number as its tokens. Arguments as of FirstStage."""

    def __init__(self, links: CardStageLinks) -> None:
        self._links = links
        self._step = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._last = torch.zeros(SLOTS, dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        links.begin(self._step)
        self._graphs = {tokens: graph_of(lambda tokens=tokens: self._receive(tokens)) for tokens in SIZES}
        links.send_tokens(self._last, 0)
        self.wrong.zero_()

    def run(self, step: int) -> None:
        self._step.fill_(step)
        self._graphs[SIZES[step % len(SIZES)]].replay()
        self._last.fill_(step)
        self._links.send_tokens(self._last, step)

    def _receive(self, tokens: int) -> None:
        for part, found in enumerate(self._links.receive(tokens)):
            assert found is not None
            self.wrong.add_((found != values(self._step, tokens, part)).sum())


def check(links: CardStageLinks, mesh: Mesh) -> None:
    """Many steps, as far ahead of one another as stages may be."""
    stage = FirstStage(links) if mesh.is_first else LastStage(links)
    for step in range(1, STEPS + 1):
        stage.run(step)
    torch.cuda.synchronize()
    assert int(stage.wrong) == 0, f"{int(stage.wrong)} values of stage {mesh.stage} are wrong"


def measure(links: CardStageLinks, mesh: Mesh) -> None:
    """Microseconds from a stream to the tokens that are sent when it has come, by its tokens."""
    last, number = torch.zeros(SLOTS, dtype=torch.int64, device="cuda"), 0
    for tokens in (1, 32, 64, 256, 1_024, 8_192):
        x, steps = torch.zeros((tokens, HIDDEN), dtype=torch.bfloat16, device="cuda"), 200
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        columns = torch.arange(number, number + steps + 2, device="cuda")
        for i in range(1, steps + 2):
            if i == 2:
                began.record()
            number += 1
            links.begin(columns[i : i + 1])
            if mesh.is_first:
                links.send(Stream(x, x))
                links.take_tokens(last, number)
            else:
                links.receive(tokens)
                links.send_tokens(last, number)
        ended.record()
        ended.synchronize()
        if mesh.is_first:
            each = began.elapsed_time(ended) * 1e3 / steps
            print(f"{tokens:>6,} tokens ({4 * tokens * HIDDEN:>12,} bytes) and back: {each:8.1f} us", flush=True)


def main() -> None:
    rank, ranks, directory, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    mesh, device = Mesh(rank, pp=ranks), torch.device("cuda:0")
    torch.cuda.set_device(device)
    torch.empty(1, device=device)  # the context
    size = StreamSize(8_192, HIDDEN, torch.bfloat16, SLOTS, max_in_flight(ranks))
    links = CardStageLinks(mesh, device, FileExchange(directory, rank, ranks), size)
    with torch.inference_mode():
        (check if what == "check" else measure)(links, mesh)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
