"""Describes selective state spaces: mixers whose states forget by what they read. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from quire.models.stateful_spec import Stateful
from quire.models.weight_numbers import Weights
from quire.scheduling.kvcache.cache_groups import Plane


@dataclass(frozen=True)
class MambaSpec(Stateful):
    """A selective state space behind a convolution, in which every channel has a state of its own (Gu & Dao 2023,
    "Mamba", section 3).

    Attributes:
        channels: Number of channels.
        state: Width of a channel's state.
        rank: Width of what step sizes are made of.
        kernel: How many tokens are convolved, the current one included.
        bias: Whether the projections of input and output have biases.
        conv_bias: Whether the convolution has a bias.
        norms: Whether what step sizes are made of, and the inputs and outputs of states are normed, with weights or
            without (`plain`).
        eps: Added to the mean squares of these norms.
    """

    channels: int
    state: int
    rank: int
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    norms: Literal["none", "plain", "weights"] = "none"
    eps: float = 1e-6

    head_dim: ClassVar[int] = 1

    @property
    def heads(self) -> int:
        """Number of parts that ranks can divide."""
        return self.channels

    @property
    def on_a_gpu(self) -> bool:
        """Whether GPUs have kernels for the layer: none scans with a state of every channel's own."""
        return False

    @property
    def selected(self) -> tuple[int, int, int]:
        """Widths of what a token's channels are projected to: its step sizes' latent, b and c."""
        return self.rank, self.state, self.state

    def weights(self) -> Weights:
        c, selected = self.channels, sum(self.selected)
        linear = c * (2 * self.inputs + selected + self.rank + self.outputs)
        other = c * (self.kernel + self.conv_bias + self.state + 2) + (self.norms == "weights") * selected
        return Weights(linear, other + self.bias * (2 * c + self.outputs))

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: the convolution's last inputs, and the states of channels."""
        convolved = Plane("inputs", (self.kernel - 1, self.channels))
        return convolved, Plane("states", (self.state, self.channels), "float32")

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        c = self.channels
        return (self.inputs, 2 * c), (c, sum(self.selected)), (self.rank, c), (c, self.outputs)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        return 2 * self.channels, self.channels, 2 * sum(self.selected), self.channels, self.channels

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that the layer holds at once on a GPU."""
        return sum(self.buffers)

    def divides(self, size: int) -> bool:
        """Whether the channels can be divided over `size` ranks."""
        return self.channels % size == 0

    def divided(self, size: int) -> MambaSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, channels=self.channels // size)


@dataclass(frozen=True)
class Mamba2Spec(Stateful):
    """A selective state space behind a convolution (Dao & Gu 2024, "Transformers are SSMs", section 7).

    Attributes:
        heads: Number of heads.
        head_dim: Width of a head.
        groups: How many inputs and outputs of states there are, each of which several heads share.
        state: Width of a head's state, beside that of the head.
        kernel: How many tokens are convolved, the current one included.
        bias: Whether projections have biases.
        conv_bias: Whether the convolution has a bias.
        norm: Whether the gated output is normed.
        norm_first: Whether the gate comes behind the norm.
        norm_groups: How many parts of the output are normed, each by itself.
        eps: Added to the mean squares.
        dt_bounds: The smallest and the largest step size.
        factors: Factors of the projected gate, inputs, b, c and step sizes; empty: 1 each.
        out_factor: Factor of the output.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    norm_first: bool = False
    norm_groups: int = 1
    eps: float = 1e-5
    dt_bounds: tuple[float, float] = (0.0, math.inf)
    factors: tuple[float, ...] = ()
    out_factor: float = 1.0

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels that are convolved."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Outputs of the input projection: the gate, what is convolved, and a step size for each head."""
        return self.inner + self.channels + self.heads

    def weights(self) -> Weights:
        linear = self.inputs * self.projected + self.inner * self.outputs
        other = self.channels * (self.kernel + self.conv_bias) + 3 * self.heads + self.norm * self.inner
        return Weights(linear, other + self.bias * (self.projected + self.outputs))

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: the last inputs of the convolution, and the states of heads."""
        convolved = Plane("inputs", (self.kernel - 1, self.channels))
        return convolved, Plane("states", (self.heads, self.state, self.head_dim), "float32")

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        return (self.inputs, self.projected), (self.inner, self.outputs)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        return self.projected, self.channels, self.inner

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that the layer holds at once on a GPU."""
        return sum(self.buffers)

    def divides(self, size: int) -> bool:
        """Whether the heads can be divided over `size` ranks, and the groups too, unless all heads share one."""
        norms = not self.norm or self.norm_groups == 1 or self.norm_groups % size == 0
        return self.heads % size == 0 and (self.groups == 1 or self.groups % size == 0) and norms

    def divided(self, size: int) -> Mamba2Spec:
        """Return the part of one of `size` ranks."""
        groups, norms = max(1, self.groups // size), max(1, self.norm_groups // size)
        return replace(self, heads=self.heads // size, groups=groups, norm_groups=norms)
