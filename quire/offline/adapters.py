"""Adapters of requests to an engine in this process: which adapter is meant, and how it is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.inprocess import InProcessClient
from quire.errors import RequestError
from quire.foundation.messages.from_engine import Done, FromEngine
from quire.foundation.messages.to_engine import Adapter, Control


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter that a prompt is answered with, in vLLM's form.

    Attributes:
        lora_name: Its name in messages and metrics.
        lora_int_id: At least 1. Quire does not need it: it tells adapters apart by their contents.
        lora_path: A directory with adapter_config.json and adapter_model.safetensors, or s3://bucket/key or a hub id of
            one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be 1 or more, got {self.lora_int_id}.", param="lora_request")
        if not self.lora_name or not self.lora_path:
            raise RequestError("lora_request needs lora_name and lora_path.", param="lora_request")


class LocalAdapters:
    """Loads adapters when they are first asked for. Files that change later are not read again."""

    def __init__(self, client: InProcessClient) -> None:
        self._client = client
        self._loaded: dict[LoRARequest, Adapter] = {}
        self._ids = itertools.count(1)  # not reused, because a call that was interrupted leaves answers behind

    def load_all(
        self,
        asked: Sequence[LoRARequest | None],
        take: Callable[[FromEngine | None], None] = lambda message: None,
    ) -> list[Adapter | None]:
        """Load the adapters that are new, side by side, and return all of them; None stands for the base model. `take`
        gets what the engine says about other requests meanwhile; by default only aborted ones may be open. Raises
        RequestError if an adapter cannot be served; the message names the tensor."""
        new = [each for each in dict.fromkeys(asked) if each is not None and each not in self._loaded]
        loading = {next(self._ids): each for each in new}
        for number, each in loading.items():
            self._client.send(Control(number, *load_command(each)))
        answers: dict[int, Done] = {}
        while len(answers) < len(loading):
            message = self._client.receive(None)
            if not isinstance(message, Done):
                take(message)
            elif message.id in loading:
                answers[message.id] = message
        for number in sorted(loading, key=lambda number: bool(answers[number].error)):  # refused ones last
            self._loaded[loading[number]] = adapter_of(answers[number])
        return [None if each is None else self._loaded[each] for each in asked]


def load_command(asked: LoRARequest) -> tuple[str, dict[str, str]]:
    """The action and value of the Control that makes the engine load an adapter."""
    return "load_adapter", {"name": asked.lora_name, "path": asked.lora_path}


def adapter_of(done: Done) -> Adapter:
    """The adapter that the engine has loaded. Raises RequestError, which names the tensor, if it was not loaded."""
    if done.error:
        raise RequestError(done.error, param="lora_request")
    return Adapter(**done.value)


def for_each(asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    """One entry of `lora_request` for each of `count` prompts. Raises RequestError if there are more, fewer or
    others."""
    if asked is None or isinstance(asked, LoRARequest):
        return [asked] * count
    if not isinstance(asked, list | tuple) or not all(each is None or isinstance(each, LoRARequest) for each in asked):
        raise RequestError(
            "lora_request must be a LoRARequest, or a list of one or None for each prompt.", param="lora_request"
        )
    if len(asked) != count:
        raise RequestError(f"{count} prompts need one lora_request or {count}, got {len(asked)}.", param="lora_request")
    return list(asked)
