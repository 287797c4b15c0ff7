"""Makes Triton's interpreter faster: half of its time went into describing the type of each value anew.

Knows nothing about what kernels compute: a type that was made is used again, and its shape with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def speed_up() -> None:
    """Patch Triton 3.6 and later; harmless to kernels that are compiled."""
    import triton.language.core as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter._get_np_dtype = _each_dtype_once(interpreter._get_np_dtype, tl)
    _make_each_block_type_once(tl)
    _make_each_shape_once(tl)
    _compare_each_pair_once(tl, TritonSemantic)


def _each_dtype_once(plain: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    """It made a dict of all dtypes for each call."""
    known: dict[str, Any] = {}

    def dtype_of(type: Any) -> Any:
        name = type.element_ty.name if isinstance(type, tl.block_type) else type.name
        if name not in known:
            known[name] = plain(type)
        return known[name]

    return dtype_of


def _make_each_block_type_once(tl: Any) -> None:
    """Nobody changes one."""
    made: dict[tuple[Any, ...], Any] = {}
    plain = tl.block_type.__init__

    def new(cls: Any, element_ty: Any, shape: Any, *others: Any, **named: Any) -> Any:
        if cls is not tl.block_type:  # those of Gluon have more fields
            return object.__new__(cls)
        shape = shape.value if isinstance(shape, tl.constexpr) else shape
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if (type := made.get(key)) is None:
            made[key] = type = object.__new__(cls)
            plain(type, element_ty, sizes)
            type.sizes = tuple(sizes)
        return type

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in self.__dict__:
            plain(self, element_ty, shape)

    def with_element_type(self: Any, element_ty: Any) -> Any:
        of_elements = self.__dict__.setdefault("with_elements", {})
        key = element_ty.name, getattr(element_ty, "address_space", None)
        if (type := of_elements.get(key)) is None:
            of_elements[key] = type = tl.block_type(element_ty, self.shape)
        return type

    tl.block_type.__new__, tl.block_type.__init__ = new, init
    tl.block_type.with_element_ty = with_element_type


def _make_each_shape_once(tl: Any) -> None:
    """A tensor's shape is its type's, made of other objects."""
    plain = tl.tensor.__init__
    scalar = tl.tuple([]), tl.constexpr(1)

    def init(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            shape, numel = scalar
        elif (known := type.__dict__.get("shape_and_numel_of_tensors")) is None:
            plain(self, handle, type)
            type.shape_and_numel_of_tensors = self.shape, self.numel
            return
        else:
            shape, numel = known
        self.handle, self.type, self.dtype, self.shape, self.numel = handle, type, type.scalar, shape, numel

    tl.tensor.__init__ = init


def _compare_each_pair_once(tl: Any, semantics: Any) -> None:
    """What two shapes are broadcast to and what two types are computed in: it compares sizes that are objects, and goes
    through lists of names."""
    broadcast, cast, compute_in = (
        semantics.broadcast_impl_value, semantics.cast, semantics.computation_type_impl,
    )  # fmt: skip
    together: dict[Any, Any] = {}
    computed: dict[Any, Any] = {}

    def broadcast_to(self: Any, operand: Any, sizes: Any) -> Any:
        if operand.type.sizes == sizes:
            return operand
        handle = self.builder.create_broadcast(operand.handle, list(sizes))
        return self.make_tensor(handle, tl.block_type(operand.type.scalar, list(sizes)))

    def broadcast_both(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.__dict__.get("sizes"), rhs.type.__dict__.get("sizes")
        if left == right and (left is not None or not (lhs.type.is_block() or rhs.type.is_block())):
            return lhs, rhs
        if left is None or right is None or len(left) != len(right):
            return broadcast(self, lhs, rhs)
        if (sizes := together.get((left, right))) is None:
            found = broadcast(self, lhs, rhs)  # which says so where they do not fit
            together[left, right] = found[0].type.sizes
            return found
        return broadcast_to(self, lhs, sizes), broadcast_to(self, rhs, sizes)

    def cast_unless_equal(self: Any, operand: Any, type: Any, *rounding: Any, **named: Any) -> Any:
        if operand.type.scalar is type.scalar:
            return operand
        return cast(self, operand, type, *rounding, **named)

    def computation_type(self: Any, a: Any, a_is_scalar: Any, b: Any, b_is_scalar: Any, divides: Any) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if (type := computed.get(key)) is None:
            computed[key] = type = compute_in(self, a, a_is_scalar, b, b_is_scalar, divides)
        return type

    semantics.broadcast_impl_value, semantics.cast = broadcast_both, cast_unless_equal
    semantics.computation_type_impl = computation_type
