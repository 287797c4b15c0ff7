"""`LLMEngine`: an engine in this process that its caller steps; requests come and go between steps. Names are vLLM's.

`LLM` and `AsyncLLM` are more comfortable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from quire.foundation.config import BUILTIN_MODEL
from quire.foundation.messages.from_engine import Deltas, FromEngine
from quire.offline.adapters import LoRARequest
from quire.offline.async_llm import EngineArgs
from quire.offline.engine_settings import AsyncEngineSettings
from quire.offline.local_engine import LocalEngine
from quire.offline.open_streams import OpenStreams
from quire.offline.prompts import Prompt, parse_prompt
from quire.offline.signature import LOG_SETTINGS, shows_settings
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer


class LLMEngine:
    """A model, ready to generate step by step. Threads may share it: their calls wait for one another. Arguments and
    errors are those of LLM."""

    @shows_settings(*LOG_SETTINGS)
    def __init__(self, model: str = BUILTIN_MODEL, **settings: Unpack[AsyncEngineSettings]) -> None:
        self._local = LocalEngine("LLMEngine", model, settings)
        self._streams = OpenStreams(self._local.client.send)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Make an LLMEngine of these arguments."""
        return cls(engine_args.model, **engine_args.settings)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Take a request; the next steps work on it. Returns its id.

        Args:
            request_id: For `abort_request`, and in the outputs; no two open requests have the same.
            prompt: See `LLM.generate`.
            params: Its parameters; `output_kind` says what each output has.
            lora_request: An adapter, with enable_lora=True. It is loaded when it is first asked for, while others run.
            priority: Lower goes first; with scheduling_policy="priority" only.

        Raises:
            RequestError: The request cannot be served.
            EngineDeadError: See `step`.
        """
        with self._local.exclusive():
            parsed = parse_prompt(prompt, self._local.tokenizer, self._local.media)
            adapter = self._local.adapters.load_all([lora_request], self._take)[0]
            sequences = self._local.sequences(parsed, params, priority, adapter)
            return self._streams.submit(request_id, parsed.text, sequences).name

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which then have no further output. Unknown ids are ignored."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        with self._local.exclusive():
            for stream in self._streams:
                if stream.name in names:
                    self._streams.leave(stream, engine_lives=True)

    def step(self) -> list[RequestOutput]:
        """Run until a step of the model has brought something. Returns the outputs of requests that have grown or
        ended. A request that failed ends with finish_reason `error`. Raises EngineDeadError if an earlier step failed,
        `close` was called, or this is a fork of the process that made the engine."""
        outputs = []
        with self._local.exclusive():
            while self._streams and not any(stream.changed.is_set() for stream in self._streams):
                self._take(self._local.client.receive(None))
            for stream in self._streams:
                if stream.changed.is_set():
                    stream.changed.clear()
                    output = stream.output(self._local)
                    if stream.finished:
                        self._streams.leave(stream, engine_lives=True)
                    if output is not None:
                        outputs.append(output)
        return outputs

    def _take(self, message: FromEngine | None) -> None:
        if isinstance(message, Deltas):
            self._streams.take(message)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._streams)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ConfigError if skip_tokenizer_init left it out."""
        return self._local.tokenizer()

    def close(self) -> None:
        """Free the engine; no other method can be called afterwards. In a fork of the process that made it, nothing
        happens."""
        self._local.close()
