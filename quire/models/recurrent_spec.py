"""Describes mixers that keep a state of each sequence instead of keys and values of tokens. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from quire.models.state_space_spec import Mamba2Spec, MambaSpec
from quire.models.stateful_spec import Stateful
from quire.models.weight_numbers import Weights
from quire.scheduling.kvcache.cache_groups import Plane


@dataclass(frozen=True)
class NoMixerSpec(Stateful):
    """The mixer of a layer that treats each token by itself."""

    heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    adapted_projections: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0),)
    buffers: ClassVar[tuple[int, ...]] = ()
    gpu_elements: ClassVar[int] = 0

    def weights(self) -> Weights:
        return Weights(0)

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: none."""
        return ()

    def divides(self, size: int) -> bool:
        """Whether there is a part for each of `size` ranks."""
        return True

    def divided(self, size: int) -> NoMixerSpec:
        """Return the part of one of `size` ranks."""
        return self


@dataclass(frozen=True)
class ShortConvSpec(Stateful):
    """A convolution of each channel over a few tokens, whose input and output are gated (Liquid AI 2025, "LFM2",
    section 2).

    Attributes:
        channels: Number of channels.
        kernel: How many tokens are convolved, the current one included.
        bias: Whether projections and convolution have biases.
    """

    channels: int
    kernel: int
    bias: bool = False

    head_dim: ClassVar[int] = 1

    @property
    def heads(self) -> int:
        """Number of parts that ranks can divide."""
        return self.channels

    def weights(self) -> Weights:
        own, biases = self.channels, self.bias * (4 * self.channels + self.outputs)
        return Weights(own * (3 * self.inputs + self.outputs), own * self.kernel + biases)

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: the last inputs of the convolution."""
        return (Plane("inputs", (self.kernel - 1, self.channels)),)

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        return (self.inputs, 3 * self.channels), (self.channels, self.outputs)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        return 3 * self.channels, self.channels

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that the layer holds at once on a GPU."""
        return sum(self.buffers)

    def divides(self, size: int) -> bool:
        """Whether the channels can be divided over `size` ranks."""
        return self.channels % size == 0

    def divided(self, size: int) -> ShortConvSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, channels=self.channels // size)


@dataclass(frozen=True)
class GatedDeltaSpec(Stateful):
    """Linear attention by the gated delta rule, behind a convolution (Yang et al. 2024, "Gated Delta Networks").

    Attributes:
        keys: Number of heads of queries and keys.
        values: Number of heads of values; as many share a query and a key.
        key_dim, value_dim: Widths of heads.
        kernel: How many tokens are convolved, the current one included.
        eps: Added to the mean squares of the output's norm.
        factor: Factor of β.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    eps: float = 1e-6
    factor: float = 1.0

    @property
    def on_a_gpu(self) -> bool:
        """Whether GPUs have kernels for the layer: they know no factor of β."""
        return self.factor == 1.0

    @property
    def heads(self) -> int:
        """Number of heads of values."""
        return self.values

    @property
    def head_dim(self) -> int:
        """Width of a head of values."""
        return self.value_dim

    @property
    def inner(self) -> int:
        """Width of the values of all heads."""
        return self.values * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels that are convolved: queries, keys and values."""
        return 2 * self.keys * self.key_dim + self.inner

    def weights(self) -> Weights:
        linear = self.inputs * (self.channels + self.inner + 2 * self.values) + self.inner * self.outputs
        return Weights(linear, self.channels * self.kernel + 2 * self.values + self.value_dim)

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: the last inputs of the convolution, and the states of heads."""
        convolved = Plane("inputs", (self.kernel - 1, self.channels))
        return convolved, Plane("states", (self.values, self.key_dim, self.value_dim), "float32")

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        main = self.inputs, self.channels + self.inner
        return main, (self.inputs, 2 * self.values), (self.inner, self.outputs)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        return self.channels + self.inner, 2 * self.values, self.channels, self.inner

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that the layer holds at once on a GPU."""
        return sum(self.buffers)

    def divides(self, size: int) -> bool:
        """Whether the heads can be divided over `size` ranks."""
        return self.keys % size == 0 and self.values % size == 0

    def divided(self, size: int) -> Self:
        """Return the part of one of `size` ranks."""
        return replace(self, keys=self.keys // size, values=self.values // size)


@dataclass(frozen=True)
class KimiDeltaSpec(GatedDeltaSpec):
    """Linear attention by a gated delta rule in which each element of a key decays by itself (Kimi Team 2025, "Kimi
    Linear", section 3).

    Attributes:
        bound: The least logarithm of what a token keeps of a state's element; None: there is none.
        by_latents: Whether decays and the output's gate are made of latents as wide as a head; otherwise, of the input.
    """

    bound: float | None = None
    by_latents: bool = True

    @property
    def on_a_gpu(self) -> bool:
        """Whether GPUs have kernels for the layer: they know no factor of β, and no bound."""
        return super().on_a_gpu and self.bound is None

    @property
    def gates(self) -> tuple[int, int, int]:
        """Widths of what decays, the output's gate and β are made of."""
        latent = self.value_dim if self.by_latents else 0
        return latent or self.values * self.key_dim, latent or self.inner, self.values

    def weights(self) -> Weights:
        adapted = sum(inputs * outputs for inputs, outputs in self.adapted_projections)
        return Weights(adapted, self.channels * self.kernel + self.values * (1 + self.key_dim) + self.value_dim)

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        into = (self.inputs, self.channels), (self.inputs, sum(self.gates))
        latent = self.value_dim
        of_latents = ((latent, self.values * self.key_dim), (latent, self.inner)) if self.by_latents else ()
        return *into, *of_latents, (self.inner, self.outputs)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        made = (self.values * self.key_dim, self.inner) if self.by_latents else ()
        return self.channels, sum(self.gates), self.channels, *made, self.inner


@dataclass(frozen=True)
class LightningSpec(Stateful):
    """Linear attention whose states decay at a fixed rate for each head (MiniMax 2025, "MiniMax-01", section 2.2).

    Attributes:
        heads: Number of heads.
        head_dim: Width of a head.
        rates: For each head of the undivided layer, the logarithm of what a token keeps of a state, which is below 0.
        eps: Added to the mean squares of the output's norm.
    """

    heads: int
    head_dim: int
    rates: tuple[float, ...]
    eps: float = 1e-6

    @property
    def on_a_gpu(self) -> bool:
        """Whether the layer is known to run on GPUs: it is not yet."""
        return False

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    def weights(self) -> Weights:
        return Weights(self.inputs * 4 * self.inner + self.inner * self.outputs, self.inner)

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: the states of heads."""
        return (Plane("states", (self.heads, self.head_dim, self.head_dim), "float32"),)

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        return (self.inputs, 3 * self.inner), (self.inputs, self.inner), (self.inner, self.outputs)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        return 3 * self.inner, self.inner, self.inner

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that the layer holds at once on a GPU."""
        return sum(self.buffers)

    def divides(self, size: int) -> bool:
        """Whether the heads can be divided over `size` ranks."""
        return self.heads % size == 0

    def divided(self, size: int) -> LightningSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, heads=self.heads // size)


RecurrentSpec = LightningSpec | ShortConvSpec | MambaSpec | Mamba2Spec | GatedDeltaSpec | KimiDeltaSpec
"""Mixers that keep a state of each sequence."""
