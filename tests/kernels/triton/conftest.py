"""Kernels run compiled where there is a card, and under Triton's interpreter elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.triton.interpreter_speed import speed_up


def _mend_interpreter() -> None:
    """Four things that the interpreter of Triton 3.6 gets wrong, and one that it does again and again."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    convert = interpreter.InterpreterBuilder.create_fp_to_fp
    cast, patch_language = interpreter.InterpreterBuilder.cast_impl, interpreter._patch_lang

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Loops over bounds known at run time: it makes an int of an array of one dimension, which numpy takes no more
        since 2.4."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """Products of bfloat16: it multiplies their bits as if they were integers."""
        a, b = (self.cast_impl(side, tl.float32) if side.dtype.scalar == tl.bfloat16 else side for side in (a, b))
        return create_dot(self, a, b, *others)

    def cast_and_round(self: Any, value: Any, dtype: Any) -> Any:
        """Rounding to bfloat16, to the nearest: it cuts."""
        if value.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, value, dtype)
        rounded = torch.tensor(value.data).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def round_to_8_bits(self: Any, value: Any, dtype: Any, rounding: Any) -> Any:
        """Rounding to e4m3: it forgets to carry into the exponent."""
        if value.dtype.scalar != tl.float32 or dtype.scalar != tl.float8e4nv:
            return convert(self, value, dtype, rounding)
        rounded = torch.tensor(value.data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return interpreter.TensorHandle(rounded, tl.float8e4nv)

    def patch_whole_language(kernel: Any) -> Any:
        """For a kernel and all functions that it calls."""
        return patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def call(self: Any, *args: Any, **named: Any) -> Any:
        """A function of a kernel: it patches the language for each call, over what is patched already."""
        return self.rewrite()(*args, **named)

    interpreter._patch_lang = patch_whole_language
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpretedFunction.__call__ = call
    interpreter.InterpreterBuilder.cast_impl = cast_and_round
    interpreter.InterpreterBuilder.create_fp_to_fp = round_to_8_bits
    interpreter.InterpreterBuilder.create_dot = dot


if not torch.cuda.is_available():
    _mend_interpreter()  # which tests/conftest.py has switched on
    speed_up()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested."""
    return "cuda" if torch.cuda.is_available() else "cpu"
