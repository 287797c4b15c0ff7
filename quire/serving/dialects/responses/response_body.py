"""The JSON of a response, without what the model says."""

from __future__ import annotations

from typing import Any

from quire.sampling_params import SamplingParams
from quire.serving.dialects.responses.schemas import ResponsesRequest
from quire.serving.dialects.responses.tools import ResponseTools

ABANDONED = "The server stopped while it worked on this response. Send the request again."


def response_head(
    fields: ResponsesRequest,
    response_id: str,
    created: float,
    model: str,
    params: SamplingParams,
    tools: ResponseTools,
    *,
    stored: bool,
) -> dict[str, Any]:
    """All fields of a response that has not begun.

    Args:
        created: Seconds since 1970; whole ones are said.
        model: The name to answer under.
        params: What the request's sampling parameters became.
        tools: Those of the request that are served.
        stored: Whether it is kept.
    """
    form = fields.text.format if fields.text else None
    reasoning = fields.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created),
        "completed_at": None,
        "status": "queued" if fields.background else "in_progress",
        "background": bool(fields.background),
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": params.temperature,
        "text": {
            "format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"},
            "verbosity": (fields.text.verbosity if fields.text else None) or "medium",
        },
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_shown(tool) for tool in tools.shown],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
    }


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool


def usage_field(usage: dict[str, Any], reasoning_tokens: int) -> dict[str, Any]:
    """Token counts.

    Args:
        usage: As chat has them.
    """
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


def failed(body: dict[str, Any], message: str) -> dict[str, Any]:
    """The response after something failed inside the server."""
    return {**body, "status": "failed", "error": {"code": "server_error", "message": message}}
