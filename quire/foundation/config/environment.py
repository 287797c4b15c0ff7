"""The only reader of `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.router import RouterConfig

_SHOWN_PREFIXES = (
    "QUIRE_", "VLLM_", "CUDA_", "NVIDIA_VISIBLE", "NCCL_", "TORCH_", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "HF_",
    "LD_LIBRARY_PATH",
)  # fmt: skip
_KERNEL_CACHE = "TRITON_CACHE_DIR"
_INSTRUCTION_SETS = ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "none")
_SHORTEST_NODE_KEY = 16
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def apply(config: Config) -> Config:
    """Fill settings that flags left open from QUIRE_API_KEY (or VLLM_API_KEY) and HF_TOKEN. Raises ConfigError if the
    variable for the key is set and empty, because then somebody meant to close the server."""
    server, model = config.server, config.model
    if not server.api_key and (key := api_key()) is not None:
        server = replace(server, api_key=(key,))
    token = os.environ.get("HF_TOKEN")
    if token and model.hf_token is None:
        model = replace(model, hf_token=token)
    return replace(config, server=server, model=model)


def apply_to_router(config: RouterConfig) -> RouterConfig:
    """Fill settings that flags left open from QUIRE_API_KEY (or VLLM_API_KEY) and QUIRE_BACKEND_API_KEY. Raises
    ConfigError if a variable for a key is set and empty."""
    if not config.api_key and (key := api_key()) is not None:
        config = replace(config, api_key=(key,))
    key = os.environ.get("QUIRE_BACKEND_API_KEY")
    if key is not None and config.backend_api_key is None:
        if not key.strip():
            raise ConfigError("QUIRE_BACKEND_API_KEY is set but empty: give it the servers' key, or unset it.")
        config = replace(config, backend_api_key=key)
    return config


def node_key(file: str | None) -> bytes:
    """The key that the machines of an engine share: from the file, or else from QUIRE_NODE_KEY. Raises ConfigError if
    there is no key, or it is too short to keep anyone out."""
    source, text = "QUIRE_NODE_KEY", os.environ.get("QUIRE_NODE_KEY", "")
    if file is not None:
        source = f"--node-key-file {file}"
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}.", param="node_key_file") from error
    if not (key := text.strip()):
        raise ConfigError(
            "Several nodes need a key that all of them have: give it by --node-key-file or in QUIRE_NODE_KEY "
            "('openssl rand -hex 32' makes one).",
            param="node_key_file",
        )
    if len(key) < _SHORTEST_NODE_KEY:
        raise ConfigError(
            f"{source}: a key has at least {_SHORTEST_NODE_KEY} characters ('openssl rand -hex 32' makes one).",
            param="node_key_file",
        )
    return key.encode()


def share_node_key(key: bytes) -> None:
    os.environ["QUIRE_NODE_KEY"] = key.decode()


def has_node_key() -> bool:
    return bool(os.environ.get("QUIRE_NODE_KEY", "").strip())


def ray_address() -> str:
    """The address of the Ray cluster in RAY_ADDRESS; empty for the cluster that this machine is part of."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return "" if address == "auto" else address


def prepare_ray() -> None:
    """Make Ray report nothing to anyone. Call this before Ray is imported."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def leave_threads_open() -> None:
    """Undo what Ray sets: one thread for each CPU that an actor asks for. Call this before torch is imported."""
    os.environ.pop("OMP_NUM_THREADS", None)


def developer_mode() -> bool:
    """Whether debug routes are served: QUIRE_SERVER_DEV_MODE=1 (or VLLM_SERVER_DEV_MODE=1)."""
    return "1" in (os.environ.get("QUIRE_SERVER_DEV_MODE"), os.environ.get("VLLM_SERVER_DEV_MODE"))


def no_color() -> bool:
    """Whether NO_COLOR forbids colours, with any value; see no-color.org."""
    return bool(os.environ.get("NO_COLOR"))


def trace_service_name() -> str:
    """The name of this service in OpenTelemetry's traces: OTEL_SERVICE_NAME, or quire."""
    return os.environ.get("OTEL_SERVICE_NAME") or "quire"


def may_load_adapters() -> bool:
    """Whether requests may load adapters without an API key: QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1 (or VLLM_…)."""
    names = ("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    return any(os.environ.get(name, "").lower() in ("1", "true") for name in names)


def max_audio_bytes() -> int:
    """The largest file of a sound: QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB (or VLLM_…) in bytes, by default 25 MiB. Raises
    ConfigError if it is no positive number."""
    names = ("QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB", "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB")
    wanted = next((value for name in names if (value := os.environ.get(name))), "25")
    try:
        size = int(float(wanted) * 2**20)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{names[0]} is {wanted!r}, and must be a number of megabytes.")
    return size


def visible_gpus() -> list[str]:
    """The numbers or UUIDs in CUDA_VISIBLE_DEVICES, in its order; by default the first GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip(", ")
    return [gpu.strip() for gpu in visible.split(",")] if visible else []


def gpu_of_engine(engine: int) -> str | None:
    """The number or UUID of the GPU of one of several engines, by its place among those that CUDA_VISIBLE_DEVICES
    leaves. None if there is no such GPU."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return str(engine)
    visible = visible_gpus()
    return visible[engine] if engine < len(visible) else None


def num_visible_gpus(installed: int) -> int:
    """How many of the GPUs of this machine CUDA_VISIBLE_DEVICES leaves."""
    return len(visible_gpus()) if "CUDA_VISIBLE_DEVICES" in os.environ else installed


def show_gpus_of_engine(engine: int, ranks: int = 1) -> None:
    """Let this process and its children see only the GPUs of this engine, one for each rank. Call this before torch or
    the driver is loaded."""
    gpus = [gpu_of_engine(engine * ranks + rank) for rank in range(ranks)]
    assert None not in gpus, "the supervisor has counted them"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def show_gpu_of_rank_first(rank: int, ranks: int) -> None:
    """Let this process see the GPUs of all ranks of its engine, its own first. So `cuda:0` is always a rank's own GPU,
    and the memory of the others can still be mapped. Call this before torch or the driver is loaded."""
    show_gpus_of_engine(0, ranks)
    gpus = visible_gpus()
    own = gpus.pop(rank)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([own, *gpus])


def prepare_nccl() -> None:
    """Keep NCCL from registering tensors that CUDA graphs read, unless the user chose. It cannot register what torch's
    allocator has mapped piece by piece. Call this before torch is loaded."""
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def number_gpus_by_pci_bus() -> None:
    """Number GPUs by PCI bus as NVML does, unless the user chose an order. CUDA's default is the fastest first.

    Call this before torch or the driver is loaded, so that the settings chosen for a GPU apply to that GPU.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def limit_openmp_spinning() -> None:
    """Limit how long OpenMP threads spin at a barrier, unless the user chose. Call this before torch is imported.

    While another program keeps one of two cores busy, a step takes 35 times as long with libgomp's default, and 2 to 4
    times as long with this limit. On an idle machine the limit costs some 5%.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "5000"


def encode_in_one_thread() -> None:
    """Encode texts one at a time: the tokenizer's threads would reserve memory and do nothing."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def allocator_is_set() -> bool:
    return bool(os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})


def kernel_cache() -> Path:
    """The directory in which Triton keeps compiled kernels."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # unchanged where the home is not known
    return Path(os.environ.get(_KERNEL_CACHE) or Path(home) / ".triton" / "cache")


def responses_store() -> Path:
    """The default file of responses, files and batches."""
    home = os.environ.get("XDG_STATE_HOME") or Path(os.path.expanduser("~")) / ".local" / "state"
    return Path(home) / "quire" / "store.sqlite"


@dataclass(frozen=True)
class NativeKernels:
    """How the CPU's kernels are compiled.

    Attributes:
        instructions: QUIRE_CPU_ISA, the best to use: avx512_bf16, avx512_vnni, avx512, avx2, or none for torch alone.
            None: those of the processor.
        compilers: Commands, tried in this order.
    """

    instructions: str | None
    compilers: tuple[str, ...]
    cache: Path


def native_kernels() -> NativeKernels:
    """Read QUIRE_CPU_ISA and CXX. Raises ConfigError if QUIRE_CPU_ISA is none of the known names."""
    instructions = os.environ.get("QUIRE_CPU_ISA") or None
    if instructions not in (None, *_INSTRUCTION_SETS):
        raise ConfigError(f"QUIRE_CPU_ISA is {instructions!r}, and must be one of {', '.join(_INSTRUCTION_SETS)}.")
    own = os.environ.get("CXX")
    return NativeKernels(instructions, (own,) if own else ("g++", "clang++"), _user_cache() / "quire" / "kernels")


@dataclass(frozen=True)
class PackedWeightCache:
    """Where a processor's packed weights are kept: `directory` has a file for each checkpoint, and `limit` is
    QUIRE_PACKED_WEIGHTS_GB in bytes, the maximum size of all files; 0 to keep none."""

    directory: Path
    limit: int


def packed_weight_cache() -> PackedWeightCache:
    """Read QUIRE_PACKED_WEIGHTS_GB. Raises ConfigError if QUIRE_PACKED_WEIGHTS_GB is not a number of gigabytes."""
    wanted = os.environ.get("QUIRE_PACKED_WEIGHTS_GB") or "32"
    try:
        limit = int(float(wanted) * 1e9)
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise ConfigError(f"QUIRE_PACKED_WEIGHTS_GB is {wanted!r}, and must be a number of gigabytes, or 0 for none.")
    return PackedWeightCache(_user_cache() / "quire" / "weights", limit)


def gguf_cache() -> Path:
    """The directory for settings and tokenizers of GGUF files."""
    return _user_cache() / "quire" / "gguf"


def overrides_cache() -> Path:
    """The directory for models whose config.json --hf-overrides changes."""
    return _user_cache() / "quire" / "overrides"


def fallback_cache() -> Path:
    """The directory for descriptions of models that transformers computes."""
    return _user_cache() / "quire" / "transformers"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")


def kernel_settings() -> dict[str, str]:
    """Variables that may change which kernels are compiled, and how."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("TRITON_", "CUDA_"))}


@contextmanager
def kernels_cached_in(directory: Path) -> Iterator[None]:
    """Let processes that are started in this context read and write compiled kernels in this directory."""
    before = os.environ.get(_KERNEL_CACHE)
    os.environ[_KERNEL_CACHE] = str(directory)
    try:
        yield
    finally:
        del os.environ[_KERNEL_CACHE]
        if before is not None:
            os.environ[_KERNEL_CACHE] = before


def shown_variables() -> dict[str, str]:
    """Variables that change what Quire, CUDA or torch do, for a bug report. Secrets are masked."""
    return {
        name: "(set, not shown)" if any(word in name for word in _SECRET_WORDS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SHOWN_PREFIXES)
    }


def with_variables(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program that is started with some more, or other values, than this process has."""
    return {**os.environ, **more}


def api_key() -> str | None:
    """The key in QUIRE_API_KEY or VLLM_API_KEY, for servers and clients. Raises ConfigError if it is set and empty."""
    key = os.environ.get("QUIRE_API_KEY", os.environ.get("VLLM_API_KEY"))
    if key is not None and not key.strip():
        raise ConfigError("QUIRE_API_KEY or VLLM_API_KEY is set but empty: give it a key, or unset it.")
    return key
