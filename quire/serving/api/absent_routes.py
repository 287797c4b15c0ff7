"""What a 404 says of a path that a user has reason to ask for: which flag adds its route, or that it is not served.

Knows nothing about which routes this server has: only what no route has taken is looked up.
"""

from __future__ import annotations

UNKNOWN = "There is no such route. GET /docs lists all of them."
_NOT_SERVED = "{path} is not served yet: this server generates text. GET /docs lists all routes."
_OPERATORS = "{path} is there with --api-key, or in developer mode (VLLM_SERVER_DEV_MODE=1) only."
_ADAPTERS = (
    "{path} is there with --enable-lora and one of --api-key, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and developer mode "
    "(VLLM_SERVER_DEV_MODE=1) only."
)
_REASONS = {
    _OPERATORS: ("/server_info", "/reset_prefix_cache", "/pause", "/resume", "/is_paused", "/admin/model"),
    _ADAPTERS: ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "{path} is there in developer mode (VLLM_SERVER_DEV_MODE=1) only.": ("/debug/counts",),
    "{path} is there with --enable-tokenizer-info-endpoint only.": ("/tokenizer_info",),
    "{path} is switched off by --disable-fastapi-docs.": ("/docs", "/redoc", "/openapi.json"),
    "Embeddings are not served yet. GET /docs lists all routes.": (
        "/v1/embeddings", "/v2/embed", "/api/embed", "/api/embeddings",
    ),
    _NOT_SERVED: (
        "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify", "/v1/moderations",
        "/generative_scoring", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
        "/v1/images/generations", "/v1/images/edits", "/v1/realtime",
    ),
    "{path} is not served yet. GET /docs lists all routes.": (
        "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile", "/abort_requests", "/collective_rpc",
        "/reset_mm_cache", "/reset_encoder_cache", "/scale_elastic_ep", "/update_weights",
        "/init_weight_transfer_engine",
    ),
    "{path} is not served: the model is chosen at the start. POST /admin/model serves another one.": (
        "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete",
    ),
}  # fmt: skip
_REASON_OF = {path: reason for reason, paths in _REASONS.items() for path in paths}


def absent_route_message(path: str) -> str:
    """Why there is no route of this path here."""
    return _REASON_OF.get(path, UNKNOWN).format(path=path)
