"""Launches are what Triton's own would be: the same compilation, the same arguments.

Nothing is launched here: Triton says how it would specialise a kernel, and compiled kernels are fakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from quire.compute.kernels.triton.launching import launch
from quire.compute.kernels.triton.launching.launch import Kernel, cdiv, fast_launch, next_power_of_2, tensor_descriptor

STREAM = 77


def kernel_of_all_kinds(a, b, c, n, m, k, SIZE: tl.constexpr, NAME: tl.constexpr):
    pass


FUNCTION = JITFunction(kernel_of_all_kinds, do_not_specialize=["c", "m"], do_not_specialize_on_alignment=["b", "k"])


class Launches:
    """Triton, which compiles a kernel for each new way to specialise it, and a card, which writes down its launches."""

    def __init__(self) -> None:
        self.compiled = 0
        self.made: list[tuple[Any, ...]] = []

    def launch_by_triton(self, *args: Any, **options: Any) -> Any:
        self.compiled += 1
        return SimpleNamespace(
            run=lambda *launch: self.made.append(launch),
            module=object(),
            function=self.compiled,
            packed_metadata=(4, 1, 0),
        )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr("triton.compiler.CompiledKernel", SimpleNamespace)
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: made.launch_by_triton)
    active = SimpleNamespace(get_current_stream=lambda device: STREAM + device, get_current_device=lambda: 0)
    monkeypatch.setattr(driver, "_active", active)
    return made


def call(
    kernel: Kernel, *args: Any, grid: tuple[int, ...] = (1,), size: int = 8, name: str = "x", **options: Any
) -> None:
    kernel[grid](*args, SIZE=size, NAME=name, **options)


def storage() -> torch.Tensor:
    """64 bytes from a multiple of 64 on."""
    whole = torch.zeros(128, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][:64]


def test_the_second_launch_goes_to_the_card_with_addresses_for_tensors(launches: Launches) -> None:
    kernel, x = Kernel(FUNCTION, on_device="is_cpu"), storage()
    for _ in range(2):
        call(kernel, x, None, x[3:], 5, 6, 1.5, grid=(7, 2), num_warps=4)
    assert launches.compiled == 1
    [made] = launches.made
    assert made == (
        7,
        2,
        1,
        STREAM,
        1,
        (4, 1, 0),
        None,
        None,
        None,
        x.data_ptr(),
        None,
        x[3:].data_ptr(),
        5,
        6,
        1.5,
        8,
        "x",
    )


@pytest.mark.parametrize("grid", [(3,), (3, 4), (3, 4, 5)])
def test_a_grid_of_fewer_dimensions_is_one_program_deep(launches: Launches, grid: tuple[int, ...]) -> None:
    kernel = Kernel(FUNCTION, on_device="is_cpu")
    for _ in range(2):
        call(kernel, 1, 1, 1, 1, 1, 1, grid=grid)
    assert launches.made[0][:3] == (*grid, 1, 1)[:3]


def test_other_constants_options_and_dtypes_are_other_compilations(launches: Launches) -> None:
    kernel, x = Kernel(FUNCTION, on_device="is_cpu"), storage()
    ways: list[Callable[[], None]] = [
        lambda: call(kernel, x, x, x, 3, 3, 3),
        lambda: call(kernel, x, x, x, 3, 3, 3, size=9),
        lambda: call(kernel, x, x, x, 3, 3, 3, name="y"),
        lambda: call(kernel, x, x, x, 3, 3, 3, num_warps=2),
        lambda: call(kernel, x, x, x, 3, 3, 3, num_stages=2),
        lambda: call(kernel, x, x, x, 3, 3, 3, launch_pdl=True),
        lambda: call(kernel, x.view(torch.int16), x, x, 3, 3, 3),
        lambda: call(kernel, x[1:], x, x, 3, 3, 3),
        lambda: call(kernel, x, None, x, 3, 3, 3),
        lambda: call(kernel, x, x, x, 1, 3, 3),
        lambda: call(kernel, x, x, x, 32, 3, 3),
        lambda: call(kernel, x, x, x, 3, 3, 0.5),
    ]
    for _ in range(2):
        for way in ways:
            way()
    assert launches.compiled == len(ways)
    assert [made[4] for made in launches.made] == [*range(1, len(ways) + 1)]


def test_what_a_kernel_is_not_specialised_by_is_no_other_compilation(launches: Launches) -> None:
    kernel, x = Kernel(FUNCTION, on_device="is_cpu"), storage()
    call(kernel, x, x, x, 3, 3, 3)
    call(kernel, x, x[1:], x[1:], 5, 16, 16)
    assert launches.compiled == 1


def tiles_of(x: torch.Tensor, rows: int, columns: int, swizzle: int = 128) -> TensorDescriptor:
    """A descriptor of these 16-bit numbers as two rows."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    return tensor_descriptor(x, (2, x.numel() // 2), (x.numel() // 2, 1), (rows, columns), layout)


def test_a_descriptor_is_handed_on_and_a_kernel_is_specialised_by_its_tiles_alone(launches: Launches) -> None:
    kernel = Kernel(FUNCTION, on_device="is_cpu")
    x, y = (storage().view(torch.bfloat16) for _ in range(2))
    given = [tiles_of(x, 8, 64), tiles_of(y, 8, 64), tiles_of(x[:16], 8, 64)]
    for descriptor in given:
        call(kernel, descriptor, 1, 1, 1, 1, 1, maxnreg=168)
    assert launches.compiled == 1
    assert [made[9] for made in launches.made] == given[1:]
    for other in (tiles_of(x, 16, 64), tiles_of(x, 8, 64, swizzle=64), tiles_of(x.view(torch.float16), 8, 64)):
        call(kernel, other, 1, 1, 1, 1, 1, maxnreg=168)
    call(kernel, given[0], 1, 1, 1, 1, 1, maxnreg=128)
    assert launches.compiled == 5


def test_tensors_of_other_devices_and_other_things_are_left_to_triton(launches: Launches) -> None:
    kernel, x = Kernel(FUNCTION), torch.zeros(4)  # is_cuda
    for odd in (x, torch.nn.Parameter(x), 2**31, tl.constexpr(3)):
        for _ in range(2):
            call(kernel, None, odd, None, 3, 3, 3)
    assert launches.compiled == 8
    assert not launches.made


@pytest.mark.parametrize("hooks", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called_by_triton(launches: Launches, hooks: str) -> None:
    kernel, chain = Kernel(FUNCTION, on_device="is_cpu"), getattr(knobs.runtime, hooks)
    call(kernel, 1, 1, 1, 1, 1, 1)
    chain.add(print)
    try:
        call(kernel, 1, 1, 1, 1, 1, 1)
        assert (launches.compiled, len(launches.made)) == (2, 0)
    finally:
        chain.remove(print)
    call(kernel, 1, 1, 1, 1, 1, 1)
    assert (launches.compiled, len(launches.made)) == (2, 1)


def test_a_kernel_that_was_compiled_only_is_not_launched(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *a, **o: SimpleNamespace(module=None))
    kernel = Kernel(FUNCTION, on_device="is_cpu")
    for _ in range(2):
        call(kernel, 1, 1, 1, 1, 1, 1)
    assert not launches.made


def test_an_unknown_option_is_refused(launches: Launches) -> None:
    with pytest.raises(TypeError):
        call(Kernel(FUNCTION), 1, 1, 1, 1, 1, 1, num_waprs=4)


def test_interpreted_kernels_stay_what_they_are() -> None:
    assert fast_launch("interpreted") == "interpreted"
    assert isinstance(fast_launch(FUNCTION), Kernel)


def test_sizes() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1_024, 1_025)] == [1, 2, 4, 4, 8, 1_024, 2_048]


# --- against what Triton itself would say ----------------------------------------------------------------------------


class _Keys(Kernel):
    """Says what each launch's key is."""

    def _launch_by_triton(self, grid: tuple[int, ...], key: tuple[object, ...], arguments: Any, options: Any) -> None:
        self.key = key


STORAGE = storage()
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 16, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63]), st.integers()
)
TENSORS = st.builds(
    lambda first, dtype: STORAGE[first:][:8].view(dtype),
    st.sampled_from([0, 8, 16, 24, 32]),
    st.sampled_from([torch.uint8, torch.int64, torch.bfloat16]),
)
DESCRIPTORS = st.builds(
    lambda dtype, *tiles: tiles_of(STORAGE.view(dtype), *tiles),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from([8, 16]),
    st.sampled_from([64, 128]),
    st.sampled_from([64, 128]),
)
VALUES = st.one_of(
    NUMBERS.filter(lambda n: -(2**63) <= n < 2**64), TENSORS, DESCRIPTORS, st.none(), st.booleans(), st.floats()
)
ARGUMENTS = st.tuples(*[VALUES] * 6, st.sampled_from([8, 16]), st.sampled_from(["x", "y"]))
OPTIONS = st.fixed_dictionaries(
    {},
    optional={"num_warps": st.sampled_from([2, 4]), "launch_pdl": st.booleans(), "maxnreg": st.sampled_from([8, 16])},
)


BIND = create_function_from_signature(FUNCTION.signature, FUNCTION.params, make_backend(GPUTarget("cuda", 90, 32)))


def triton_says() -> Callable[..., str]:
    def key(*args: Any, **options: Any) -> str:
        _, specialization, given_options = BIND(*args, **options)
        return compute_cache_key({}, specialization, dict(sorted(given_options.items())))

    return key


SAYS = triton_says()


@settings(max_examples=1_000)
@given(ARGUMENTS, ARGUMENTS, OPTIONS, OPTIONS, st.sets(st.integers(0, 7)))
def test_equal_keys_are_equal_to_triton(one: Any, other: Any, options: Any, others: Any, same: set[int]) -> None:
    other = tuple(one[i] if i in same else other[i] for i in range(8))
    kernel = _Keys(FUNCTION, on_device="is_cpu")
    call(kernel, *one[:6], size=one[6], name=one[7], **options)
    key = kernel.key
    call(kernel, *other[:6], size=other[6], name=other[7], **others)
    if key == kernel.key and launch._ELSE not in key:
        assert SAYS(*one, **options) == SAYS(*other, **others)


def test_a_look_up_has_the_key_of_the_launch_in_whatever_order_options_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's keys have options as they come: what is compiled ahead in one order is not found in another."""
    keys = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, specialization, given_options = BIND(*args, **options)
        keys.append((compute_cache_key({}, specialization, given_options), warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    kernel, asked = Kernel(FUNCTION), {"num_warps": 4, "num_stages": None, "launch_pdl": True, "SIZE": 8, "NAME": "x"}
    for order in itertools.permutations(asked):
        named = {name: asked[name] for name in order}
        kernel.look_up(STORAGE, None, 1.5, 16, 1, True, **named)
        kernel[(1,)](STORAGE, None, 1.5, 16, 1, True, **named)
    [(looked_up, first), (launched_by, second)] = dict.fromkeys(keys)
    assert looked_up == launched_by
    assert (first, second) == (True, False)
