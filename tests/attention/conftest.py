"""Backends of a GPU run there, or under Triton's interpreter."""

from __future__ import annotations

from tests.kernels.triton.conftest import device

__all__ = ["device"]
