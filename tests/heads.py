"""Tiny EAGLE-3 heads in the layout of published ones, and what they propose by the paper's description, in plain torch.

Li et al. 2025, arXiv:2503.01840, sections 3.1 and 3.2. The model is `transformers`'.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.foundation.messages.workers import Plan
from quire.runtime.worker.speculation.draft_model import DraftModel
from quire.runtime.worker.speculation.step_drafts import StepDrafts

HIDDEN, HEADS, KV_HEADS, WIDTH, EPS = 64, 4, 2, 16, 1e-6
TIE = 1e-3
"""Logits that differ by less are as good as each other."""


def make_eagle3(
    directory: Path,
    *,
    vocab_size: int,
    draft_vocab: int = 0,
    sources: Sequence[int] = (0, 1, 2),
    embedding: bool = False,
    seed: int = 5,
    std: float = 0.1,
    hidden: int = HIDDEN,
    layer: str = "midlayer",
    **config: Any,
) -> Path:
    """Write a random head for a model of make_llama's sizes and return its directory.

    Args:
        draft_vocab: Tokens that it knows; 0: all of them.
        embedding: Whether it has embeddings of its own.
        layer: What its files call the layer.
        config: Beside what is in config.json, or in place of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    q, kv, inner = HEADS * WIDTH, KV_HEADS * WIDTH, 96
    shapes = {
        f"{layer}.self_attn.q_proj": (q, 2 * hidden),
        f"{layer}.self_attn.k_proj": (kv, 2 * hidden),
        f"{layer}.self_attn.v_proj": (kv, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, q),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
        "fc": (hidden, len(sources) * hidden),
        "lm_head": (draft_vocab or vocab_size, hidden),
    }
    if embedding:
        shapes["embed_tokens"] = (vocab_size, hidden)
    tensors = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = 1 + random(hidden)
    tensors["norm.weight"] = 1 + random(hidden)
    if draft_vocab:
        known = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = known - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, known, True)
    save_file(tensors, directory / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "vocab_size": vocab_size, "rms_norm_eps": EPS,
        "draft_vocab_size": draft_vocab or vocab_size, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "eagle_aux_hidden_state_layer_ids": list(sources), "torch_dtype": "float32",
    } | config  # fmt: skip
    (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return directory


class ReferenceHead:
    """What the head of a directory proposes for the model of another; all in fp32.

    Args:
        head, model: The directories.
        sources: The streams that are read, by the layers that they enter.
    """

    def __init__(self, head: Path, model: Path, sources: Sequence[int] = (0, 1, 2)) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = json.loads((head / "config.json").read_text())
        stored = load_file(head / "model.safetensors")
        self.weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
        self._sources = sources
        self._norms_residual = config.get("norm_before_residual", False)
        own = self.weights.get("embed_tokens.weight")
        self._embedding = self.model.get_input_embeddings().weight.detach() if own is None else own

    def streams(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, sources · hidden], what the model computes."""
        with torch.no_grad():
            states = self.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self._sources], -1)

    def logits(self, tokens: Sequence[int], drafts: int) -> list[Tensor]:
        """For the sequence's next tokens, [draft vocabulary] each, as greedy drafts lead to one another."""
        given, states = list(tokens), F.linear(self.streams(tokens[:-1]), self.weights["fc.weight"])
        found = []
        for _ in range(drafts):
            own = self.layer(torch.tensor(given[1:]), states)[-1:]
            found.append(F.linear(self._norm(own, "norm"), self.weights["lm_head.weight"])[0])
            given.append(self.token(int(found[-1].argmax())))
            states = torch.cat((states, own))
        return found

    def token(self, own: int) -> int:
        """The model's id of one of the head's tokens."""
        return own + int(self.weights["d2t"][own]) if "d2t" in self.weights else own

    def layer(self, behind: Tensor, states: Tensor) -> Tensor:
        """[tokens] of the tokens behind the positions, [tokens, hidden] → [tokens, hidden], before the norm."""
        n, weights = len(behind), self.weights
        normed = self._norm(states, "midlayer.hidden_norm")
        both = torch.cat((self._norm(self._embedding[behind], "midlayer.input_layernorm"), normed), -1)
        q, k, v = (
            F.linear(both, weights[f"midlayer.self_attn.{name}_proj.weight"]).view(n, -1, WIDTH).transpose(0, 1)
            for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        scores = q @ k.mT / math.sqrt(WIDTH) + torch.full((n, n), -math.inf).triu(1)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        x = normed if self._norms_residual else states
        x = x + F.linear(attended, weights["midlayer.self_attn.o_proj.weight"])
        inner = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(inner, weights[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]

    def _rotated(self, x: Tensor) -> Tensor:
        """[heads, tokens, width] of positions from 0 on."""
        frequencies = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        left, right = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Proposer(Protocol):
    """What a head should propose."""

    def logits(self, tokens: Sequence[int], drafts: int) -> list[Tensor]:
        """For the sequence's next tokens, as greedy drafts lead to one another."""

    def token(self, own: int) -> int:
        """The model's id of one of the head's tokens."""


class Noted:
    """What heads proposed.

    Attributes:
        drafts: By all tokens of the sequence.
        plans: That drafters heard of.
    """

    def __init__(self) -> None:
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        self.plans: list[Plan] = []

    def check(self, reference: Proposer, every: int = 7) -> None:
        """Some of it is what the reference proposes, up to ties."""
        assert len(self.drafts) > 100
        for context, proposed in list(self.drafts.items())[::every]:
            for logits, token in zip(reference.logits(context, len(proposed)), proposed, strict=True):
                if token != reference.token(int(logits.argmax())):
                    ours = next(own for own in range(len(logits)) if reference.token(own) == token)
                    assert float(logits.max() - logits[ours]) < TIE
                    break


def proposed(model: DraftModel, plan: Plan, drafts: StepDrafts) -> Iterator[tuple[list[int], list[int]]]:
    """Of each row that has drafts its tokens and the drafts, read from the device where only that knows them."""
    for place, end in enumerate(drafts.counts.cumsum().tolist()):
        slot = plan.slots[plan.sampled_rows[place]]
        if not (count := int(drafts.counts[place])):
            continue
        tokens, own = model._sequences[slot].tokens, drafts.tokens[end - count : end].tolist()
        if (slots := model._steps.followed) is not None:
            gained = int(slots.length[slot]) + 1 - model._is_head - len(tokens)
            tokens = tokens + slots.recent[slot].tolist()[slots.recent.shape[1] - gained :]
            own = slots.drafts[slot, :count].tolist()
        yield tokens, own


@contextmanager
def noting(first: int) -> Iterator[Noted]:
    """Within it what heads propose is noted, for sequences whose first token is `first`."""
    found, begin, propose = Noted(), DraftModel.begin, DraftModel.propose

    def beginning(self: DraftModel, plan: Plan) -> None:
        found.plans.append(plan)
        begin(self, plan)

    def proposing(self: DraftModel, plan: Plan, max_read: int) -> StepDrafts:
        drafts = propose(self, plan, max_read)
        for tokens, own in proposed(self, plan, drafts):
            found.drafts[first, *tokens] = own
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "begin", beginning)
        patch.setattr(DraftModel, "propose", proposing)
        yield found
