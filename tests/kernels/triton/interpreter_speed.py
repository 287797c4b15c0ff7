"""Makes Triton's interpreter faster: half of its time went into describing the type of each value anew.

Knows nothing about what kernels compute: a type that was made is used again, and its shape with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def speed_up() -> None:
    """Patch Triton 3.6 and later; harmless to kernels that are compiled."""
    import triton.language.core as tl
    from triton.runtime import interpreter

    interpreter._get_np_dtype = _each_dtype_once(interpreter._get_np_dtype, tl)
    _make_each_block_type_once(tl)
    _make_each_shape_once(tl)


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
        return type

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in self.__dict__:
            plain(self, element_ty, shape)

    tl.block_type.__new__, tl.block_type.__init__ = new, init


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
