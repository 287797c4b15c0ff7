"""Words by which programs of different cards of a host tell one another how far they have come.

A word only increases, by less than 2³¹ at a time, and may wrap around, so words are compared by their distance.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def release(address, value):
    """Write an int32 word at an int64 address for all devices of this host, by one thread.

    Whoever reads it also sees all that this program wrote before its last barrier.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, thread;
        }""",
        "=r,l,r",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def acquire(address):
    """Read such a word by all threads; what is read after it is at least as new."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for(address, value, POLLS: tl.constexpr):
    """Wait until the word has come to `value`, for at most POLLS looks; return how many looks were too early."""
    polls = 0
    while (acquire(address) - value < 0) & (polls < POLLS):
        polls += 1
    return polls
