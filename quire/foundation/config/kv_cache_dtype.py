"""What the elements of a KV cache may be.

Quantized keys and values are stored divided by a scale: one for the keys and one for the values of each KV head of each
layer. Knows nothing about tensors.
"""

from __future__ import annotations

from typing import Literal, get_args

from quire.errors import ConfigError

KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
"""As --kv-cache-dtype says it."""
QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Element types of 8 bits, with scales."""


def check_kv_cache_dtype(name: str) -> None:
    """
    Raises:
        ConfigError: It is none of those.
    """
    if name not in (served := get_args(KVCacheDtype)):
        raise ConfigError(f"--kv-cache-dtype {name} is not one of {', '.join(served)}.", param="kv_cache_dtype")


def is_quantized(kv_cache_dtype: KVCacheDtype) -> bool:
    """Whether elements have 8 bits, whatever the model's are."""
    return element_dtype(kv_cache_dtype, "") in QUANTIZED


def element_dtype(kv_cache_dtype: KVCacheDtype, dtype: str) -> str:
    """The name of an element's type.

    Args:
        dtype: The model's, which is also the cache's where nothing else is asked for.
    """
    if kv_cache_dtype == "auto":
        return dtype
    return "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype


def element_bytes(name: str, dense: dict[str, int]) -> int:
    """Bytes of an element.

    Args:
        name: See element_dtype.
        dense: Bytes of the types that a model may have.
    """
    return 1 if name in QUANTIZED else dense[name]
