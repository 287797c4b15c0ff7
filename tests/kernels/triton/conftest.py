"""Kernels run compiled where there is a card, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported, so set before any is

    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Loops over bounds that are known at run time: Triton 3.6 makes an int of an array of one dimension, which
        numpy takes no more since 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested."""
    return "cuda" if torch.cuda.is_available() else "cpu"
