"""Compiles the kernels behind the benchmark's small cases for sm_90, on a machine without a card.

    python -m tests.kernels.triton.compile_cases [--float16] [OP …]

Cases are in bf16, or where it is asked for in fp16. Says which ops did not compile, or compute in another dtype, and
fails then.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
import traceback
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire.compute.kernels.dispatch import KERNELS, kernel
from quire.compute.kernels.triton.experts import experts
from quire.compute.kernels.triton.linear import grouped, linear
from quire.tools.bench import kernel_cases
from quire.tools.bench.kernels import all_cases


class NoCard:
    """A driver that knows what to compile for, and can do nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(arguments: list[str]) -> int:
    """Compile; the exit code."""
    ops, in_fp16 = [each for each in arguments if each != "--float16"], "--float16" in arguments
    triton.runtime.driver.set_active(NoCard())
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    linear.is_sm_90 = grouped.is_sm_90 = lambda device: True  # type: ignore[assignment]
    if not in_fp16:  # mxfp4 is packed for products in bf16 alone
        experts.is_sm_90 = lambda device: True  # type: ignore[assignment]
    _pack_for_a_card()
    failed = False
    for case in all_cases(torch.device("cpu")):
        if "triton" not in KERNELS.get((case.op, "cuda"), "") or (ops and case.op not in ops):
            continue
        function = kernel(case.op, "cuda")
        sys.modules[function.__module__].__dict__["can_overlap"] = lambda device: True
        args, kwargs = case.make(torch.device("cpu"))
        try:
            if in_fp16:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(JITFunction, "__getitem__", compile_in_fp16)
                    function(*as_fp16(args), **as_fp16(kwargs))
            else:
                function(*args, **kwargs)
            print(case.op)
        except Exception:
            failed = True
            print(f"{case.op} {case.name}\n{traceback.format_exc()}", file=sys.stderr)
    return failed


def _pack_for_a_card() -> None:
    """Cases pack weights for where their tensors are."""
    for module in pkgutil.iter_modules(kernel_cases.__path__):
        cases = importlib.import_module(f"{kernel_cases.__name__}.{module.name}")
        if hasattr(cases, "kernel"):
            cases.kernel = lambda op, device: kernel(op, "cuda")


def compile_only(self: JITFunction[Any], grid: Any) -> Any:
    """In place of `kernel[grid]`: compiles what it would launch."""

    def compiled(*args: Any, **kwargs: Any) -> None:
        assert not pulled_apart(self.warmup(*args, grid=grid, **kwargs).asm["ptx"]), self

    return compiled


def compile_in_fp16(self: JITFunction[Any], grid: Any) -> Any:
    """The same, of what has no operand in bf16."""

    def compiled(*args: Any, **kwargs: Any) -> None:
        ptx = self.warmup(*args, grid=grid, **kwargs).asm["ptx"]
        assert "bf16" not in ptx, self
        assert not pulled_apart(ptx), self

    return compiled


def as_fp16(value: Any) -> Any:
    """The same with the bits of each bf16 taken for fp16: enough to compile for."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.float16) if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return {name: as_fp16(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        made = [as_fp16(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: as_fp16(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **fields)
    return torch.float16 if value is torch.bfloat16 else value


def pulled_apart(ptx: str) -> list[str]:
    """Registers with two 8-bit floats of one conversion of which the second is shifted out: ptxas 12.8 shifts before it
    converts."""
    pairs = re.findall(r"cvt\.rn\.satfinite\.(?:relu\.)?e[45]m[23]x2\.f32\s+(%\w+)", ptx)
    return [pair for pair in pairs if re.search(rf"shr\.\w+\s+%\w+, {re.escape(pair)}, 8\b", ptx)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
