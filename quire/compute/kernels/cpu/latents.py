"""What stands before and behind attention over latents, by the norm's kernel and torch's products."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.norm import rms_norm
from quire.compute.kernels.reference import latents as reference
from quire.compute.kernels.reference.latents import head_products

__all__ = ["head_products", "latent_inputs"]


def latent_inputs(q: Tensor, latent: Tensor, weight: Tensor, eps: float, qk: Tensor) -> None:
    reference.latent_inputs(q, latent, weight, eps, qk, norm=rms_norm)
