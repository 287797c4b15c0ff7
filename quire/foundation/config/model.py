"""Which model, and how it is read and shown to clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.foundation.config.values import check_range

ModelDtype = Literal["auto", "bfloat16", "float", "float16", "float32", "half"]
"""As --dtype says it."""
LoadFormat = Literal["auto", "safetensors", "gguf", "bitsandbytes", "dummy"]
"""As --load-format says it."""
ModelImpl = Literal["auto", "quire", "transformers", "vllm"]
"""As --model-impl says it."""
BUILTIN_MODEL = "quill"
"""The model that ships with the package, and the default."""


@dataclass(frozen=True)
class ModelConfig:
    """The model, its tokenizer and its limits."""

    model: str = BUILTIN_MODEL
    """A directory with a Hugging Face checkpoint, a GGUF file, a hub id, or the built-in model `quill`. Of several GGUF
    models in one place, DIR:Q4_K_M or org/name:Q4_K_M is the one with that in its name."""
    gguf_file: str | None = None
    """The name of a GGUF file in --model's directory or hub repository; of a split model its first."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer, if not the model's own."""
    skip_tokenizer_init: bool = False
    """Work on token ids only; no tokenizer is loaded."""
    dtype: ModelDtype = "auto"
    """Of weights, activations and KV cache; half is float16, float is float32. auto: the checkpoint's, but bfloat16 for
    Gemma in float16, which overflows, and float32 where this processor is slow at 16 bits. Processors compute no
    float16: on them it is bfloat16, or float32, as auto has it."""
    quantization: str | None = None
    """How weights are quantized. fp8 and bitsandbytes (4 bits) quantize a dense checkpoint at the start. Else it is the
    checkpoint's own method, which need not be given: awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq, modelopt,
    mxfp4 or quark."""
    model_impl: ModelImpl = "auto"
    """What computes the model: quire: Quire's own layers; transformers: transformers' modules, which serve more
    architectures, slower. auto: Quire's layers if they serve the architecture, else transformers. vllm is quire."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """What the model is run for: generate: text, and with --pooler-config or an embedding model's files vectors
    beside it; pooling: vectors, labels or scores of whole texts. auto: pooling for embedding models, rerankers and
    classifiers, else generate."""
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    """What a model that generates text is made into: embed: an embedding model; classify: a classifier or reranker, by
    its classifier_from_token. auto: what its files say; none: nothing."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """How texts are pooled, as JSON, where the model's files do not say it or say it wrongly, such as {"pooling_type":
    "MEAN"} (or CLS, LAST, MAX, MEAN_SQRT_LEN, WEIGHTED_MEAN, ALL, STEP). Other keys: use_activation, dimensions,
    logit_mean, logit_sigma, step_tag_id, returned_token_ids, task."""
    language_model_only: bool = False
    """Serve text alone, with a model that sees images too: its tower is not loaded."""
    max_model_len: int | Literal["auto"] | None = None
    """Longest sequence, prompt and output together, in tokens. auto (or -1): the longest that fits into the KV cache.
    Default: the model's own limit."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer on the hub. Default: the model's, if it is the model's own tokenizer."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's config.json, as JSON, such as {"rope_scaling": {"rope_type": "yarn",
    "factor": 4.0, "original_max_position_embeddings": 32768}}."""
    hf_token: str | None = None
    """Token for gated models on the hub."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may use for the model; the first is the one reported. Default: --model as given."""
    seed: int = 0
    """Seed of dummy weights and, offline, of the seeds of requests that bring none."""
    max_logprobs: int = 20
    """Most likely tokens a request may ask log probabilities of; -1 for no limit."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = "raw_logprobs"
    """What is reported of sampled tokens: `raw` is the model's output, `processed` what tokens are sampled from (after
    penalties, temperature and top-p); `logits` are not normalized. For prompts it is always raw_logprobs."""
    logits_processors: tuple[str, ...] = ()
    """Classes, as package.module:Class, that may change the logits of requests that pass them `vllm_xargs`. Their code
    runs inside the engine."""
    generation_config: str = "auto"
    """Source of default sampling values. auto: the model's generation_config.json; quire or vllm: none; else a
    directory."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Default sampling values that replace the model's, as JSON."""

    def __post_init__(self) -> None:
        check_range(self, -1, None, "max_logprobs")

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use; answers have the first."""
        return self.served_model_name or (self.model,)


@dataclass(frozen=True)
class LoadConfig:
    """Reading the weights."""

    load_format: LoadFormat = "auto"
    """auto: as the files are. safetensors, gguf and bitsandbytes say what they have to be. dummy: random weights, for
    measuring."""
    download_dir: str | None = None
    """Where hub downloads are kept. Default: huggingface_hub's own cache."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while weights are read."""
