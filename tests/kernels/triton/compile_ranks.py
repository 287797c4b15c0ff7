"""Compiles the kernels by which ranks reach one another's memory for sm_90, on a machine without a card.

    python -m tests.kernels.triton.compile_ranks

Says which have compiled.
"""

from __future__ import annotations

import torch
import triton
from triton.runtime.jit import JITFunction

from quire.compute.kernels.triton.ranks import handed_on, pulled, pulled_norm, pushed, pushed_norm
from quire.compute.kernels.triton.ranks.stage_window import layout_of
from tests.kernels.triton.compile_cases import NoCard, compile_only


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    for module in (handed_on, pulled, pulled_norm, pushed, pushed_norm):
        module.__dict__["can_overlap"] = lambda device: True
    layout = layout_of(513, 3, 8_192 * 4_096 * 2)
    x = torch.zeros((32, 4_096), dtype=torch.bfloat16)
    windows, step, last = (torch.zeros(n, dtype=torch.int64) for n in (2, 1, 513))
    for stream in (handed_on.send_stream, handed_on.receive_stream):
        stream(x, x, windows, step, layout)
        print(stream.__name__)
    for tokens in (handed_on.send_tokens, handed_on.take_tokens):
        tokens(last, windows, 7, layout)
        print(tokens.__name__)
    pulled.all_reduce_pulled(x, windows, torch.zeros(128, dtype=torch.int32), 1 << 20, 0, 2)
    print(pulled.all_reduce_pulled.__name__)
    pushed.all_reduce_pushed(x, windows, torch.zeros(1_024, dtype=torch.int32), 1 << 20, 0, 2)
    print(pushed.all_reduce_pushed.__name__)
    for width, rank, ranks in ((4_096, 0, 2), (2, 1, 2), (2_880, 1, 3)):
        x = torch.zeros((32, width), dtype=torch.bfloat16)
        for code in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
            out = torch.zeros(x.shape, dtype=code)
            scales = None if code == x.dtype else torch.zeros((len(x), 1))
            common = (x, x[0], 1e-5, out, scales, x.clone(), windows, torch.zeros(1_024, dtype=torch.int32), 1 << 12)
            pushed_norm.rms_norm_pushed(*common, rank, ranks)
            pulled_norm.rms_norm_pulled(*common, 1 << 20, rank, ranks)
    print(pushed_norm.rms_norm_pushed.__name__, pulled_norm.rms_norm_pulled.__name__)


if __name__ == "__main__":
    main()
