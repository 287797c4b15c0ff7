"""Heads of multi-token prediction in tiny checkpoints, and what they propose by their published descriptions.

transformers leaves such heads out of its models. A head's layers here are copies of the model's, which transformers
computes; what is around it follows DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.checkpoints import TINY, edit_config, make_tiny
from tests.models_sweep.rows import ROWS, SHAPE


@dataclass(frozen=True)
class Layout:
    """How a family stores its head.

    Attributes:
        architecture: The class of the model in transformers.
        blocks: What the names in each layer begin with.
        names: Of the norm of embeddings, the norm of states, the projection and the last norm; None: there is none.
        state_first: The state comes before the embedding.
        keeps_normed: A further draft's state is normed.
        config: What config.json says besides.
        sizes: What the model has otherwise than its row.
        dense: The head's layer has an MLP, and the model's last one experts.
        reads_images: The text model is within one that reads images, and so are its names and its part of config.json.
    """

    architecture: str
    blocks: tuple[str, ...]
    names: tuple[str, str, str, str | None]
    state_first: bool = False
    keeps_normed: bool = False
    config: dict[str, Any] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    dense: bool = False
    reads_images: bool = False


_NEXTN = ("model.layers.3.enorm", "model.layers.3.hnorm", "model.layers.3.eh_proj", "model.layers.3.shared_head.norm")
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_MIMO = (
    "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.input_proj",
    "model.mtp_layers.0.final_layernorm",
)  # fmt: skip
_NEXT = {"num_nextn_predict_layers": 1}
LAYOUTS = {
    "deepseek": Layout("DeepseekV3ForCausalLM", ("model.layers.3.",), _NEXTN, config=_NEXT),
    "glm": Layout("Glm4MoeForCausalLM", ("model.layers.3.",), _NEXTN, config=_NEXT),
    "hy3": Layout(
        "HYV3ForCausalLM", ("model.layers.3.",), (*_NEXTN[:3], "model.layers.3.final_layernorm"), config=_NEXT
    ),
    "exaone": Layout(
        "ExaoneMoeForCausalLM", ("mtp.layers.0.",), _QWEN, keeps_normed=True, dense=True,
        sizes={"layer_types": ["full_attention"] * 4},
    ),
    "qwen3_next": Layout("Qwen3NextForCausalLM", ("mtp.layers.0.",), _QWEN, keeps_normed=True),
    "qwen3_5": Layout("Qwen3_5MoeForCausalLM", ("mtp.layers.0.",), _QWEN, keeps_normed=True, reads_images=True),
    "nemotron": Layout(
        "NemotronHForCausalLM", ("mtp.layers.0.", "mtp.layers.1."),
        ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"),
        keeps_normed=True, config=_NEXT | {"mtp_layers_block_type": ["attention", "moe"]},
    ),
    "mimo": Layout(
        "Qwen2ForCausalLM", ("model.mtp_layers.0.",), _MIMO, state_first=True, keeps_normed=True,
        config={"architectures": ["MiMoForCausalLM"]},
    ),
    "ernie": Layout(
        "Ernie4_5ForCausalLM", ("model.mtp_block.0.",),
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
            row = SHAPE | {key: value for key, value in ROWS[layout.architecture].items() if "window" not in key}
            row.update(layout.sizes)
            if layout.reads_images:
                _make_reading_images(directory, layout.architecture, row)
            else:
                make_tiny(directory, layout.architecture, **row)
        self._layout = layout
        generator = torch.Generator().manual_seed(seed)
        if planted:
            _silence(directory)
        kind = AutoModelForImageTextToText if layout.reads_images else AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(directory, dtype=torch.float32)
        self._decoder: Any = self.model.model.language_model if layout.reads_images else self.model.model
        with torch.no_grad():
            self._build(generator, planted=planted)
        self._store(directory)
        self.directory = directory

    def _build(self, generator: torch.Generator, *, planted: bool) -> None:
        layers, config = list(self._decoder.layers), self._decoder.config
        kinds = getattr(config, "layers_block_type", None)
        if kinds is None:
            attending = [layer for layer in reversed(layers) if hasattr(layer, "self_attn")]
            own = [next(layer for layer in attending if not self._layout.dense or hasattr(layer.mlp, "gate_proj"))]
        else:
            own = [layers[kinds.index(kind)] for kind in ("full_attention", "moe")]
        self.layers = torch.nn.ModuleList(copy.deepcopy(own))
        norm, hidden = self._decoder.norm_f if kinds else self._decoder.norm, config.hidden_size
        self.norms = [copy.deepcopy(norm) for _ in range(3)]
        self.fuse = torch.empty(hidden, 2 * hidden).normal_(0.0, 0.1, generator=generator)
        if planted:
            self.fuse.zero_()
            columns = slice(hidden, None) if self._layout.state_first else slice(hidden)
            self.fuse[:, columns] = torch.eye(hidden)
            self.norms[0].weight.fill_(1.0)
            return
        for parameter in (*self.layers.parameters(), *(each.weight for each in self.norms)):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)

    def _store(self, directory: Path) -> None:
        layout, stored = self._layout, load_file(directory / "model.safetensors")
        token_norm, state_norm, fuse, norm = layout.names
        own = {
            f"{begin}{name}": tensor
            for begin, layer in zip(layout.blocks, self.layers, strict=True)
            for name, tensor in layer.state_dict().items()
        }
        own |= {f"{token_norm}.weight": self.norms[0].weight, f"{state_norm}.weight": self.norms[1].weight}
        own[f"{fuse}.weight"] = self.fuse
        if norm is not None:
            own[f"{norm}.weight"] = self.norms[2].weight
        if layout.names == _NEXTN:  # copies of what the model has
            own[f"{layout.blocks[0]}embed_tokens.weight"] = self.model.get_input_embeddings().weight
            own[f"{layout.blocks[0]}shared_head.head.weight"] = self.model.get_output_embeddings().weight
        self.num_parameters = sum(each.numel() for name, each in own.items() if not name.endswith(_SHARED))
        tensors = stored | {name: tensor.detach().contiguous().clone() for name, tensor in own.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        edit_config(directory, layout.config or {})

    def logits(self, tokens: Sequence[int], drafts: int) -> list[Tensor]:
        """For the sequence's next tokens, [vocabulary] each, as greedy drafts lead to one another."""
        given, found = list(tokens), []
        with torch.no_grad():
            states = self._decoder(torch.tensor([given[:-1]])).last_hidden_state
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
        rotary = getattr(self._decoder, "rotary_emb", None)
        for layer in self.layers:
            out = layer(
                x,
                attention_mask=torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1),
                position_ids=positions,
                position_embeddings=None if rotary is None else rotary(x, positions),
            )
            x = out[0] if isinstance(out, tuple) else out
        return x


def _make_reading_images(directory: Path, architecture: str, text: dict[str, Any]) -> None:
    """Write a tiny model that reads images, whose text model is of the architecture."""
    whole = getattr(transformers, architecture.replace("CausalLM", "ConditionalGeneration"))
    rope = text["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    text = TINY | text | {"rope_parameters": rope, "head_dim": 32}
    sizes: dict[str, Any] = {"text_config": text, "vision_config": tower | {"out_hidden_size": 64}}
    model, generator = whole(whole.config_class(**sizes)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if bool((parameter == 1.0).all()) else 0.0, 0.2, generator=generator)
    model.save_pretrained(directory)


_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def _silence(directory: Path) -> None:
    """Let the model's layers add nothing to the stream."""
    stored = load_file(directory / "model.safetensors")
    silent = {name: tensor.zero_() if ".o_proj." in name or ".down_proj." in name else tensor
              for name, tensor in stored.items()}  # fmt: skip
    save_file(silent, directory / "model.safetensors", {"format": "pt"})
