"""An EAGLE-3 head for Quill in plain torch, with the parameter names of published heads, and its loss.

Li et al. 2025, https://arxiv.org/abs/2503.01840. The head proposes tokens for a model and reads what that has computed:
the residual streams that enter some of its layers, and its embeddings. At position p it sees what the model computed
there and the token at p + 1, and predicts the token behind that. For a further draft its own hidden state takes the
place of the model's; so it does in training as well, which is the paper's training-time test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quill.corpus import IGNORED, Batch
from quill.model import FeedForward, Llama, Shape, document_mask, rotate

SOURCES = (2, 4, 7)
"""The residual streams that are read, by the layers that they enter."""
DRAFTS = 5
"""Steps of the training-time test."""
DECAY = 0.8
"""Each of them counts this much of the one before."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head.

    Attributes:
        layer: Of its decoder layer; `vocab_size` is the model's.
        draft_vocab_size: Tokens that it can propose.
        sources: See SOURCES.
    """

    layer: Shape
    draft_vocab_size: int = 2048
    sources: tuple[int, ...] = SOURCES


QUILL_EAGLE3 = HeadShape(
    Shape(hidden_size=384, intermediate_size=512, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2)
)


@dataclass(frozen=True)
class Taught:
    """What the model computes of a batch.

    Attributes:
        features: [B, T, sources · hidden_size], the residual streams.
        logits: [B, T, draft vocabulary], of the tokens that the head can propose.
        served: [B, T] bool, whether the likeliest token is one of these.
    """

    features: Tensor
    logits: Tensor
    served: Tensor


class HeadAttention(nn.Module):
    """Attention of a query to the positions before it, as the model computed them, and to the drafts since."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.groups = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [B, T, 2 · hidden_size]; `seen`, keys and values of earlier steps, is given this step's.

        The first step's are those of the context: of these, `mask` [B, 1, T, T] says which are seen. Of each later step
        a position sees its own entry alone: the draft that led to it.
        """
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head_dim).transpose(1, 2)  # [B, heads, T, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        seen.append((k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)))
        (context_k, context_v), *drafts = seen
        q = q * self.head_dim**-0.5
        scores = (q @ context_k.mT).masked_fill(~mask, float("-inf"))
        own = [(q * draft_k).sum(-1, keepdim=True) for draft_k, _ in drafts]  # [B, heads, T, 1] each
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        attended = weights[..., :length].to(v.dtype) @ context_v
        for number, (_, draft_v) in enumerate(drafts):
            attended = attended + weights[..., length + number, None].to(v.dtype) * draft_v
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))
        return out


class HeadLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        embedded: Tensor,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        seen: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), dim=-1)
        x = x + self.self_attn(both, rope, mask, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """The head of a model, which lends it its embeddings.

    Args:
        shape: See HeadShape.
        tokens: [draft_vocab_size] ascending, those that it can propose.
    """

    def __init__(self, shape: HeadShape, tokens: Tensor) -> None:
        super().__init__()
        hidden = shape.layer.hidden_size
        assert len(tokens) == shape.draft_vocab_size
        self.shape = shape
        self.fc = nn.Linear(len(shape.sources) * hidden, hidden, bias=False)
        self.midlayer = HeadLayer(shape.layer)
        self.norm = nn.RMSNorm(hidden, eps=shape.layer.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        offered = torch.zeros(shape.layer.vocab_size, dtype=torch.bool)
        offered[tokens] = True
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        self.register_buffer("t2d", offered)
        self.d2t: Tensor
        self.t2d: Tensor
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / 2**0.5 if writes else 0.02)

    def start_from(self, model: Llama) -> None:
        """The model's last norm and its head's rows are a good beginning."""
        with torch.no_grad():
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.model.embed_tokens.weight[self.t2d])

    @property
    def tokens(self) -> Tensor:
        """[draft_vocab_size] int64, those that it can propose."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def unrolled(self, model: Llama, batch: Batch, features: Tensor, drafts: int) -> list[Tensor]:
        """The training-time test: [B, T, hidden_size], normed, for each of `drafts` steps.

        Step k at position p knows the true tokens up to p + 1 + k and what the model computed up to p.
        """
        length = batch.tokens.shape[1]
        positions = torch.arange(length, device=features.device)
        causal = positions[:, None] >= positions
        mask = (causal & (batch.documents[:, :, None] == batch.documents[:, None, :]))[:, None]
        x = self.fc(features).float()  # the stream, whatever products are computed in
        outputs: list[Tensor] = []
        seen: list[tuple[Tensor, Tensor]] = []
        for k in range(drafts):
            places = (positions + k).clamp(max=length - 1)  # what would stand behind the row is in no loss
            embedded = model.model.embed_tokens(_ahead(batch.tokens, 1 + k)).detach()
            x = self.midlayer(embedded, x, (model.cos[places], model.sin[places]), mask, seen)
            outputs.append(self.norm(x))
        return outputs


def taught(model: Llama, head: Head, batch: Batch) -> Taught:
    """What the model computes of a batch."""
    with torch.no_grad():
        streams, hidden = model.streams(batch.tokens, document_mask(batch.documents), head.shape.sources)
        logits = model.logits(hidden)
        return Taught(torch.cat(streams, dim=-1), logits[..., head.t2d], head.t2d[logits.argmax(-1)])


def loss_of(head: Head, model: Llama, batch: Batch, by_model: Taught, drafts: int = DRAFTS) -> tuple[Tensor, Tensor]:
    """Cross entropy to the model's distribution over the tokens that the head can propose (the paper's section 3.2).

    Only the assistant's tokens count, and of these the ones where the model's favourite can be proposed.

    Returns:
        The loss; and [drafts], of how many positions the first, the first two … drafts are the model's favourites.
    """
    total = torch.zeros((), device=batch.tokens.device)
    agreed: Tensor | None = None
    rates: list[Tensor] = []
    for k, hidden in enumerate(head.unrolled(model, batch, by_model.features, drafts)):
        asked = _asked(batch, 1 + k)
        wanted, served = _ahead(by_model.logits, 1 + k), _ahead(by_model.served, 1 + k)
        counted = asked & served
        logits = head.lm_head(hidden[counted]).float()
        aim = wanted[counted].float().softmax(-1)
        loss = -(aim * logits.log_softmax(-1)).sum(-1)
        total = total + DECAY**k * loss.sum() / asked.sum().clamp(min=1)
        with torch.no_grad():
            right = torch.zeros_like(asked)
            right[counted] = logits.argmax(-1) == aim.argmax(-1)
            agreed = right if agreed is None else agreed & right
            rates.append(agreed[asked].float().mean())
    return total, torch.stack(rates)


def _asked(batch: Batch, ahead: int) -> Tensor:
    """[B, T] of which positions the target that stands so far ahead is the assistant's and of the same document."""
    same = _ahead(batch.documents, ahead) == batch.documents
    asked = (_ahead(batch.targets, ahead) != IGNORED) & same
    asked[:, -ahead:] = False
    return asked


def _ahead(x: Tensor, by: int) -> Tensor:
    """[B, T, …] of what stands `by` places further on; at the end something of the row."""
    return x.roll(-by, dims=1)


def frequent_tokens(batches: Sequence[Batch], vocabulary: int, number: int) -> Tensor:
    """[number] ascending, the tokens that the assistant says most often."""
    counts = torch.zeros(vocabulary, dtype=torch.int64, device=batches[0].targets.device)
    for batch in batches:
        counts += batch.targets[batch.targets != IGNORED].bincount(minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:number].sort().values.cpu()
