"""Heads of multi-token prediction in tiny checkpoints, and what they propose by their published descriptions.

transformers leaves such heads out of its models. A head's layer here is a copy of one of the model's, which
transformers computes; what is around it follows DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import edit_config, make_tiny
from tests.models_sweep.rows import ROWS, SHAPE


@dataclass(frozen=True)
class Layout:
    """How a family stores its head.

    Attributes:
        architecture: The class of the model in transformers.
        block: What the names in the layer begin with.
        names: Of the norm of embeddings, the norm of states, the projection and the last norm; None: there is none.
        state_first: The state comes before the embedding.
        keeps_normed: A further draft's state is normed.
        config: What config.json says besides.
    """

    architecture: str
    block: str
    names: tuple[str, str, str, str | None]
    state_first: bool = False
    keeps_normed: bool = False
    config: dict[str, Any] | None = None


_NEXTN = ("model.layers.3.enorm", "model.layers.3.hnorm", "model.layers.3.eh_proj", "model.layers.3.shared_head.norm")
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_MIMO = (
    "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.input_proj",
    "model.mtp_layers.0.final_layernorm",
)  # fmt: skip
LAYOUTS = {
    "deepseek": Layout("DeepseekV3ForCausalLM", "model.layers.3.", _NEXTN, config={"num_nextn_predict_layers": 1}),
    "glm": Layout("Glm4MoeForCausalLM", "model.layers.3.", _NEXTN, config={"num_nextn_predict_layers": 1}),
    "qwen3_next": Layout("Qwen3NextForCausalLM", "mtp.layers.0.", _QWEN, keeps_normed=True),
    "mimo": Layout(
        "Qwen2ForCausalLM", "model.mtp_layers.0.", _MIMO, state_first=True, keeps_normed=True,
        config={"architectures": ["MiMoForCausalLM"]},
    ),
    "ernie": Layout(
        "Ernie4_5ForCausalLM", "model.mtp_block.0.",
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None),
    ),
}  # fmt: skip


class MtpReference:
    """A tiny checkpoint with a head, and what the head proposes; all in fp32.

    Args:
        directory: Where it is written; a model that is there already gets a head.
        planted: Whether the model's layers add nothing to an embedding, and the head hands the next token's on, so that
            its drafts are always right.
    """

    def __init__(self, directory: Path, layout: Layout, *, planted: bool = False, seed: int = 3) -> None:
        if not (directory / "config.json").exists():
            row = {key: value for key, value in ROWS[layout.architecture].items() if "window" not in key}
            make_tiny(directory, layout.architecture, **SHAPE | row)
        self._layout = layout
        generator = torch.Generator().manual_seed(seed)
        if planted:
            _silence(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            self._build(generator, planted=planted)
        self._store(directory)
        self.directory = directory

    def _build(self, generator: torch.Generator, *, planted: bool) -> None:
        layers = list(self.model.model.layers)
        self.layer = copy.deepcopy(next(layer for layer in reversed(layers) if hasattr(layer, "self_attn")))
        norm, hidden = self.model.model.norm, self.model.config.hidden_size
        self.norms = [copy.deepcopy(norm) for _ in range(3)]
        self.fuse = torch.empty(hidden, 2 * hidden).normal_(0.0, 0.1, generator=generator)
        if planted:
            self.fuse.zero_()
            columns = slice(hidden, None) if self._layout.state_first else slice(hidden)
            self.fuse[:, columns] = torch.eye(hidden)
            self.norms[0].weight.fill_(1.0)
            return
        for parameter in (*self.layer.parameters(), *(each.weight for each in self.norms)):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)

    def _store(self, directory: Path) -> None:
        layout, stored = self._layout, load_file(directory / "model.safetensors")
        token_norm, state_norm, fuse, norm = layout.names
        own = {f"{layout.block}{name}": tensor for name, tensor in self.layer.state_dict().items()}
        own |= {f"{token_norm}.weight": self.norms[0].weight, f"{state_norm}.weight": self.norms[1].weight}
        own[f"{fuse}.weight"] = self.fuse
        if norm is not None:
            own[f"{norm}.weight"] = self.norms[2].weight
        if "nextn" in str(layout.config):  # copies of what the model has
            own["model.layers.3.embed_tokens.weight"] = self.model.get_input_embeddings().weight
            own["model.layers.3.shared_head.head.weight"] = self.model.get_output_embeddings().weight
        self.num_parameters = sum(each.numel() for name, each in own.items() if not name.endswith(_SHARED))
        tensors = stored | {name: tensor.detach().contiguous().clone() for name, tensor in own.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        edit_config(directory, layout.config or {})

    def logits(self, tokens: Sequence[int], drafts: int) -> list[Tensor]:
        """For the sequence's next tokens, [vocabulary] each, as greedy drafts lead to one another."""
        given, found = list(tokens), []
        with torch.no_grad():
            states = self.model.model(torch.tensor([given[:-1]])).last_hidden_state
            for _ in range(drafts):
                own = self._through(torch.tensor([given[1:]]), states)
                normed = own if self._layout.names[3] is None else self.norms[2](own)
                found.append(self.model.get_output_embeddings()(normed)[0, -1])
                given.append(int(found[-1].argmax()))
                states = torch.cat((states, (normed if self._layout.keeps_normed else own)[:, -1:]), 1)
        return found

    def token(self, own: int) -> int:
        """The model's id of one of the head's tokens."""
        return own

    def _through(self, behind: Tensor, states: Tensor) -> Tensor:
        """[1, tokens] of the tokens behind the positions, and states [1, tokens, hidden] → those before the norm."""
        both = [self.norms[0](self.model.get_input_embeddings()(behind)), self.norms[1](states)]
        x, n = F.linear(torch.cat(both[::-1] if self._layout.state_first else both, -1), self.fuse), behind.shape[1]
        positions = torch.arange(n)[None]
        out = self.layer(
            x,
            attention_mask=torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1),
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        tensor: Tensor = out[0] if isinstance(out, tuple) else out
        return tensor


_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def _silence(directory: Path) -> None:
    """Let the model's layers add nothing to the stream."""
    stored = load_file(directory / "model.safetensors")
    silent = {name: tensor.zero_() if ".o_proj." in name or ".down_proj." in name else tensor
              for name, tensor in stored.items()}  # fmt: skip
    save_file(silent, directory / "model.safetensors", {"format": "pt"})
