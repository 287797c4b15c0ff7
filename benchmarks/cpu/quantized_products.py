"""What products with quantized weights take on a processor beside dense ones of bf16: one thread's processor time.

    python benchmarks/cpu/quantized_products.py [--outputs 4096] [--columns 1024] [--rows 1,4,16,64,256] [--torch]

Several weights of each form are multiplied in turn, so that they come from memory; printed are milliseconds of one
product, the best of five rounds. --torch adds the reference, which expands the weight for each product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quire.compute.kernels.cpu import grouped_linear, linear, scaled_linear
from quire.compute.kernels.reference import linear as grouped_reference
from quire.compute.kernels.reference import linear as scaled_reference
from quire.compute.kernels.reference.linear import ScaledWeight

WEIGHTS = 24
"""More than a processor's last cache holds."""
GROUP = 128
Product = Callable[[Tensor], object]


def dense(outputs: int, columns: int) -> Product:
    """bf16."""
    packed = linear.pack_linear(torch.randn(outputs, columns).bfloat16())
    return lambda x: linear.linear(x, packed, None)


def four_bits(outputs: int, columns: int, *, by_torch: bool = False) -> Product:
    """W4A16 with zeros."""
    codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, columns // GROUP), dtype=torch.uint8)
    module = grouped_reference if by_torch else grouped_linear
    packed = module.pack_grouped(codes, torch.rand(zeros.shape), zeros, 4, GROUP, None)
    return lambda x: module.grouped_linear(x, packed, None)


def int8(outputs: int, columns: int, *, by_torch: bool = False) -> Product:
    """W8A8, a scale for each output."""
    codes = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8)
    module = scaled_reference if by_torch else scaled_linear
    packed = module.pack_scaled(ScaledWeight(codes, torch.rand((outputs, 1)), (1, columns)))
    return lambda x: module.scaled_linear(x, packed, None)


def fp8(outputs: int, columns: int, *, by_torch: bool = False) -> Product:
    """A scale for each output."""
    codes = torch.randn(outputs, columns).to(torch.float8_e4m3fn)
    module = scaled_reference if by_torch else scaled_linear
    packed = module.pack_scaled(ScaledWeight(codes, torch.rand((outputs, 1)), (1, columns)))
    return lambda x: module.scaled_linear(x, packed, None)


def milliseconds(products: list[Product], x: Tensor) -> float:
    """Of one product."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for product in products:
            product(x)
        best = min(best, time.thread_time() - began)
    return 1e3 * best / len(products)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--torch", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = arguments.outputs, arguments.columns
    forms = {"bf16": [dense(*shape) for _ in range(WEIGHTS)]}
    forms["4 bits"] = [four_bits(*shape) for _ in range(WEIGHTS)]
    forms["int8"] = [int8(*shape) for _ in range(WEIGHTS)]
    forms["fp8"] = [fp8(*shape) for _ in range(WEIGHTS)]
    if arguments.torch:
        for name, make in (("4 bits", four_bits), ("int8", int8), ("fp8", fp8)):
            forms[f"{name} by torch"] = [make(*shape, by_torch=True)]
    for rows in map(int, arguments.rows.split(",")):
        x = torch.randn(rows, arguments.columns).bfloat16()
        print(
            f"{rows} rows:",
            "  ".join(f"{name} {milliseconds(made, x):.2f}" for name, made in forms.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
