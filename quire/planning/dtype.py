"""What a model is computed in: what was asked for, or the checkpoint's dtype, on a device that is served in it."""

from __future__ import annotations

from typing import Literal

from quire.errors import ConfigError
from quire.foundation.config.model import ModelDtype
from quire.models.spec import ModelSpec
from quire.planning.machine import Machine

Dtype = Literal["bfloat16", "float16", "float32"]
_NAMES: dict[ModelDtype, Dtype | None] = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float": "float32",
    "float16": "float16",
    "float32": "float32",
    "half": "float16",
}


def resolve_dtype(asked: ModelDtype, spec: ModelSpec, machine: Machine, *, on_gpu: bool) -> tuple[Dtype, str]:
    """The dtype and the reason for it. Raises ConfigError if the model overflows in it."""
    wanted = _NAMES[asked]
    if wanted == "float16":
        return _asked_float16(asked, spec, machine, on_gpu=on_gpu)
    if wanted is not None:
        return wanted, "as asked"
    if spec.dtype == "float32":
        return "float32", "the checkpoint's"
    if not on_gpu:
        return _on_a_cpu("the checkpoint's" if spec.dtype == "bfloat16" else f"for {spec.dtype} weights", machine)
    if spec.dtype == "float16" and spec.family.overflows_float16:
        return "bfloat16", f"for float16 weights of {spec.architecture}, whose activations overflow in float16"
    return ("float16" if spec.dtype == "float16" else "bfloat16"), "the checkpoint's"


def _asked_float16(asked: str, spec: ModelSpec, machine: Machine, *, on_gpu: bool) -> tuple[Dtype, str]:
    if not on_gpu:
        return _on_a_cpu(f"in place of {asked}, which is slow", machine)
    if spec.family.overflows_float16:
        raise ConfigError(
            f"--dtype {asked}: activations of {spec.architecture} overflow in float16. Leave it out, or give "
            "--dtype bfloat16.",
            param="dtype",
        )
    return "float16", "as asked"


def _on_a_cpu(reason: str, machine: Machine) -> tuple[Dtype, str]:
    """A dtype of 16 bits, where that is no slower."""
    if machine.fast_bfloat16:
        return "bfloat16", reason if reason == "the checkpoint's" else f"{reason} on a CPU"
    return "float32", "this processor has no bfloat16 products, and there are no kernels of our own"
