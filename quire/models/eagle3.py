"""The architecture of the EAGLE-3 draft head (Li et al. 2025, arXiv:2503.01840), a decoder layer that proposes tokens.

At each position, the head reads the embedding of the next token and the state that the target model computed at the
position (`lent.py`). Its layer is Llama's, except that attention reads both inputs, each normed, side by side. The head
may know only a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream
from quire.compute.kernels.dispatch import kernel
from quire.errors import CheckpointError
from quire.models.head_spec import HeadSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.norm import RMS
from quire.models.layers.rotary import Positions
from quire.models.lent import Lent
from quire.models.projections import build_attention, build_mlp
from quire.models.rope import Rotaries
from quire.models.spec import ModelSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class Eagle3Head:
    """Embedding, one layer, norm and head; `lent` is what the target model lends."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, lent: Lent) -> None:
        assert isinstance(spec.head, HeadSpec)
        norm, hidden = RMS(spec.norm.eps), spec.hidden
        token_norm, state_norm, mlp_norm = (f"{spec.layer_name(0)}.{name}" for name in spec.family.modules.norms)
        self._states = lent.states
        own = spec.head.own_embedding
        self._embed = build.embedding("embed_tokens", spec.vocab_size, hidden) if own else None
        self._embed_lent = lent.embed
        self._rotaries = Rotaries(spec.layers, build.options)
        self._token_norm = build.norm(token_norm, hidden, norm)
        self._state_norm = build.norm(state_norm, hidden, norm)
        self._norm_before_residual = spec.head.norm_before_residual
        self._attention = build_attention(spec, build, 0)
        self._mlp = build_mlp(spec, build, 0)
        self._mlp_norm = build.norm(mlp_norm, hidden, norm, self._mlp.row_form)
        self._norm = build.norm("norm", hidden, norm)
        self._head = build.head("lm_head", None, spec.head.vocab_size, hidden)
        self._tokens = None
        if spec.head.vocab_size < spec.vocab_size:
            self._tokens = build.remember(DraftTokens(spec.head.vocab_size, spec.vocab_size, build.options))
        self._copy_stream = kernel("copy_stream", build.options.device.type)
        self._spread_columns = kernel("spread_columns", build.options.device.type)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Embed the tokens that follow the positions."""
        if self._embed is not None:
            return Stream(self._embed(tokens), None)
        return Stream(self._embed_lent(tokens, positions).x, None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """Run the head's layer; the stream that it yields begins with the target model's states."""
        x = self._states.take()
        tokens, hidden = x.shape
        both = x.new_empty((tokens, 2 * hidden))
        normed = self._state_norm(x)
        self._copy_stream(self._token_norm(stream.x), None, both[:, :hidden])
        self._copy_stream(normed, None, both[:, hidden:])
        x = normed if self._norm_before_residual else x
        (angles,) = self._rotaries(positions)
        delta = self._attention(both, angles, attention)
        yield Stream(x, self._mlp(self._mlp_norm.rows(x, delta)))

    def finish(self, stream: Stream) -> Tensor:
        normed = self._norm(*stream)
        self._states.keep(stream.x)  # with the delta, which the norm has added
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [n, hidden] → [n, vocab_size]; minus infinity for tokens that the head does not know."""
        own: Tensor = self._head(hidden)
        if self._tokens is None:
            return own
        logits = own.new_empty((len(own), self._tokens.vocab_size))
        self._spread_columns(own, self._tokens.ids, logits)
        return logits


class DraftTokens:
    """The tokens that a head knows; the checkpoint's `d2t` has each token's id minus its index in the head.

    Attributes:
        vocab_size: Size of the target model's vocabulary.
        ids: [tokens] int64, the target model's token ids; set when the weights are loaded.
    """

    def __init__(self, count: int, vocab_size: int, options: TensorOptions) -> None:
        self.vocab_size = vocab_size
        self._count = count
        self._options = options
        self.ids: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield WeightSpec("d2t", (self._count,), dtypes=("I64", "I32"))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.contents().get("d2t")
        offsets = torch.zeros(self._count, dtype=torch.int32 if stored and stored.dtype == "I32" else torch.int64)
        checkpoint.read("d2t", offsets)
        ids = offsets.long() + torch.arange(self._count)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size or len(set(ids.tolist())) < self._count:
            raise CheckpointError(
                f"d2t must name {self._count} tokens of {self.vocab_size}, each once: it is an offset from a draft "
                "token's id to the model's."
            )
        self.ids = ids.to(self._options.device)
