"""Descriptors say what their tensors are, and keep none."""

from __future__ import annotations

import gc
import weakref

import torch
from triton.experimental.gluon import language as gl

from quire.compute.kernels.triton.launching.launch import specialization_of, tensor_descriptor

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def matrix(rows: int = 32) -> torch.Tensor:
    """At an address that 16 divides."""
    return torch.zeros(rows * 64 + 8, dtype=torch.bfloat16)[: rows * 64].view(rows, 64)


def test_it_says_what_is_asked_for() -> None:
    x = matrix()
    descriptor = tensor_descriptor(x, (32, 64), (64, 1), (16, 64), LAYOUT)
    assert (descriptor.base.data_ptr(), descriptor.base.dtype) == (x.data_ptr(), x.dtype)
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ([32, 64], [64, 1], [16, 64])


def test_the_same_memory_is_described_once_and_other_memory_or_another_view_again() -> None:
    x, y = matrix(), matrix()
    first = tensor_descriptor(x, (32, 64), (64, 1), (16, 64), LAYOUT)
    assert tensor_descriptor(x, (32, 64), (64, 1), (16, 64), LAYOUT) is first
    others = [
        tensor_descriptor(y, (32, 64), (64, 1), (16, 64), LAYOUT),
        tensor_descriptor(x, (16, 64), (64, 1), (16, 64), LAYOUT),
        tensor_descriptor(x, (32, 64), (128, 1), (16, 64), LAYOUT),
        tensor_descriptor(x, (32, 64), (64, 1), (8, 64), LAYOUT),
        tensor_descriptor(x.view(torch.float16), (32, 64), (64, 1), (16, 64), LAYOUT),
    ]
    assert len({id(each) for each in (first, *others)}) == 6
    assert [specialization_of(each) == specialization_of(first) for each in others] == [True, True, True, False, False]


def test_a_tensor_is_not_kept() -> None:
    x = matrix()
    alive = weakref.ref(x)
    descriptor = tensor_descriptor(x, (32, 64), (64, 1), (16, 64), LAYOUT)
    del x
    gc.collect()
    assert alive() is None
    assert descriptor.base.dtype == torch.bfloat16
