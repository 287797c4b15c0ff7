"""Heads within checkpoints that predict one token more (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section
2.2), as drafters. Their kinds are described in `mtp_spec.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream, added, total_of
from quire.compute.kernels.dispatch import kernel
from quire.models.blocks import build_block
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.lent import Lent
from quire.models.mtp_spec import MtpSpec
from quire.models.rope import Rotaries
from quire.models.spec import ModelSpec


class MtpHead:
    """Two norms, a projection, layers and a norm; embeddings, states and logits are what the model lends."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, lent: Lent) -> None:
        assert isinstance(spec.head, MtpSpec)
        dense, name, hidden = LayerFactory(build.options), f"model.layers.{spec.head.layer}", spec.hidden
        self._spec = spec.head
        self._lent = lent
        self._rotaries = Rotaries(spec.layers, build.options)
        self._token_norm, self._state_norm = (
            dense.stream_norm(f"{name}.{norm}", hidden, spec.norm) for norm in ("enorm", "hnorm")
        )
        self._fuse = dense.whole(f"{name}.eh_proj", hidden, 2 * hidden, bias=False)
        self._blocks = [build_block(spec, build, layer) for layer in range(len(spec.layers))]
        self._norm = None
        if spec.head.has_norm:
            self._norm = dense.stream_norm(f"{name}.shared_head.norm", hidden, spec.norm)
        for layer in dense.layers:  # which are never quantized
            build.remember(layer)
        self._copy_stream = kernel("copy_stream", build.options.device.type)
        self.logits = lent.logits

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Embed the tokens that follow the positions."""
        return Stream(self._lent.embed(tokens, positions).x, None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """Run the head's layers on the embeddings and the model's states."""
        states = self._lent.states.take()
        tokens, hidden = states.shape
        both = states.new_empty((tokens, 2 * hidden))
        parts = both[:, :hidden], both[:, hidden:]
        of_tokens, of_states = reversed(parts) if self._spec.state_first else parts
        self._copy_stream(self._token_norm(stream.x), None, of_tokens)
        self._copy_stream(self._state_norm(states), None, of_states)
        stream = Stream(self._fuse(both), None)
        for block, angles in zip(self._blocks, self._rotaries(positions), strict=True):
            stream = block(*stream, angles, attention)
            yield stream

    def finish(self, stream: Stream) -> Tensor:
        """Norm the stream, and keep the head's own states for the drafts that follow."""
        if self._norm is None:
            if stream.delta is not None:
                added(stream.x, total_of(stream.delta))
            self._lent.states.keep(stream.x)
            return stream.x
        normed = self._norm(*stream)
        self._lent.states.keep(normed if self._spec.keeps_normed else stream.x)
        return normed
