"""`AsyncLLM`: an engine in this process whose outputs stream to coroutines. Names are vLLM's.

A thread loads the model and runs the engine's loop; each message hops to the event loop once, where tokens become text.
Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config import BUILTIN_MODEL
from quire.errors import ConfigError, EngineDeadError, GenerationError, RequestError
from quire.messages import Abort, Control, Deltas, Done, FromEngine
from quire.offline.local_engine import LocalEngine
from quire.offline.prompts import Prompt, parse_prompt
from quire.outputs import RequestOutput
from quire.sampling import RequestOutputKind, SamplingParams
from quire.text.sequence_accumulator import SequenceAccumulator, dispatch_deltas
from quire.text.tokenizer import Tokenizer

_CLOSED = "The engine was shut down. Create a new AsyncLLM."


class AsyncEngineArgs:
    """The model and settings of an AsyncLLM; see there."""

    def __init__(self, model: str = BUILTIN_MODEL, **settings: Any) -> None:
        self.model = model
        self.settings = settings


@dataclass
class _Stream:
    """One prompt's sequences while they are generated."""

    sequences: Sequence[SequenceAccumulator]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.choice.finished for sequence in self.sequences)


class AsyncLLM:
    """A model, ready to generate for many coroutines of one event loop.

    Args:
        model: See LLM.
        **settings: See LLM.

    Attributes:
        startup: Seconds of the engine's start, by stage.

    Raises:
        ConfigError: An unknown or unsupported setting; the message names it.
        SetupError: The model cannot be served.
    """

    def __init__(self, model: str = BUILTIN_MODEL, **settings: Any) -> None:
        self._open: dict[int, SequenceAccumulator] = {}
        self._stream_of: dict[int, _Stream] = {}  # by sequence
        self._by_request: dict[str, _Stream] = {}
        self._controls: dict[int, asyncio.Future[Done]] = {}
        self._control_ids = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        self._closing = False
        self._preparing = ThreadPoolExecutor(1, "prompts")  # long prompts and new grammars take their time
        started: Future[LocalEngine] = Future()
        self._thread = threading.Thread(target=self._run, args=(model, settings, started), name="engine", daemon=True)
        self._thread.start()
        self._local = started.result()
        self.startup = self._local.startup
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Of these arguments."""
        return cls(engine_args.model, **engine_args.settings)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt as they grow: each holds everything so far, the last is `finished`. With `output_kind`
        FINAL_ONLY only that one. A generator that is closed early aborts its sequences.

        Args:
            prompt: See `LLM.generate`.
            sampling_params: Default: the model's own defaults.
            request_id: For `abort`, and in the outputs; no two open requests have the same. Made up where left out.
            priority: Lower goes first; with scheduling_policy="priority" only.

        Raises:
            RequestError: The prompt or its parameters cannot be served.
            GenerationError: It failed.
            EngineDeadError: A step failed, or `shutdown` was called.
        """
        self._attach()
        params = sampling_params or SamplingParams(**self._local.text.defaults.fill({}))

        def prepare() -> tuple[str | None, list[SequenceAccumulator]]:
            parsed = parse_prompt(prompt, lambda: _given(self._local.text.tokenizer))
            return parsed.text, self._local.sequences(parsed, params, priority)

        text, sequences = await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)
        name = str(sequences[0].add.id) if request_id is None else request_id
        stream = self._submit(name, sequences)
        try:
            while True:
                await stream.changed.wait()
                stream.changed.clear()
                if stream.error is not None:
                    raise stream.error
                finished = stream.finished
                if finished or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield self._output(name, text, stream)
                if finished:
                    return
        finally:
            self._leave(name, stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now; their streams end with finish_reason `abort`. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._by_request.get(name)) is not None:
                self._local.client.send(Abort([s.add.id for s in stream.sequences if s.add.id in self._open]))

    async def reset_prefix_cache(self) -> bool:
        """Forget what is cached of earlier prompts."""
        await self._control("reset_prefix_cache")
        return True

    async def counts(self) -> dict[str, int]:
        """What the engine holds, for leak tests."""
        return (await self._control("counts")).value

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is no longer there."""
        if self._failure is not None:
            raise self._failure

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: It was left out by skip_tokenizer_init.
        """
        return _given(self._local.text.tokenizer)

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._failure is None

    @property
    def errored(self) -> bool:
        """Whether it takes none any more."""
        return self._failure is not None

    @property
    def dead_error(self) -> Exception:
        """Why."""
        return self._failure or EngineDeadError(_CLOSED)

    def shutdown(self) -> None:
        """Free the engine; open requests end with EngineDeadError. The process's exit does it too."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.shutdown)
        self._local.client.send(Control(0, "counts"))  # wakes the engine's thread
        self._thread.join()
        self._preparing.shutdown(wait=False)
        self._stop(EngineDeadError(_CLOSED))

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self, model: str, settings: dict[str, Any], started: Future[LocalEngine]) -> None:
        try:
            local = LocalEngine(model, settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(local)
        try:
            while not self._closing:
                message = local.client.receive(None)
                if message is not None and self._loop is not None:
                    with suppress(RuntimeError):  # the event loop is closed
                        self._loop.call_soon_threadsafe(self._take, message)
        except Exception as error:
            self._stop(EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}"))
        finally:
            local.close()

    def _stop(self, failure: Exception) -> None:
        """There is no engine any more; from any thread."""
        self._failure = self._failure or failure
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._fail, self._failure)

    # --- the event loop ---------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Use the running event loop, now and for all that is open."""
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._open and self._loop is not None and not self._loop.is_closed():
                raise ConfigError("An AsyncLLM serves one event loop at a time.")
            self._loop = loop

    def _submit(self, name: str, sequences: Sequence[SequenceAccumulator]) -> _Stream:
        if self._failure is not None:
            raise self._failure
        if name in self._by_request:
            raise RequestError(f"A request with the id '{name}' is open already.", param="request_id")
        stream = self._by_request[name] = _Stream(sequences)
        for sequence in sequences:
            self._open[sequence.add.id] = sequence
            self._stream_of[sequence.add.id] = stream
        self._local.client.send(sequences[0].add)  # with its forks
        return stream

    def _leave(self, name: str, stream: _Stream) -> None:
        """The stream has no reader any more."""
        del self._by_request[name]
        left = [s.add.id for s in stream.sequences if self._open.pop(s.add.id, None) is not None]
        for sequence in stream.sequences:
            self._stream_of.pop(sequence.add.id, None)
        if left and self._failure is None:
            self._local.client.send(Abort(left))

    def _take(self, message: FromEngine) -> None:
        """A message of the engine."""
        if isinstance(message, Done):
            waiting = self._controls.pop(message.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        if not isinstance(message, Deltas):
            return
        touched = {*message.ids, *(end.id for end in message.ends), *(number for number, _ in message.prompt_logprobs)}
        streams = [stream for number in touched if (stream := self._stream_of.get(number)) is not None]
        for sequence in dispatch_deltas(message, self._open):
            number = sequence.add.id
            if sequence.end is None:  # a stop string
                self._local.client.send(Abort([number]))
            elif sequence.end.reason == "error":
                self._stream_of[number].error = GenerationError(sequence.end.message)
            del self._open[number]
        for stream in streams:
            stream.changed.set()

    def _fail(self, failure: Exception) -> None:
        """The engine is gone."""
        for stream in self._by_request.values():
            stream.error = failure
            stream.changed.set()
        for waiting in self._controls.values():
            if not waiting.done():
                waiting.set_exception(failure)
        self._controls.clear()

    async def _control(self, action: str) -> Done:
        self._attach()
        number = next(self._control_ids)
        waiting: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._controls[number] = waiting
        self._local.client.send(Control(number, action))
        return await waiting

    def _output(self, name: str, text: str | None, stream: _Stream) -> RequestOutput:
        """What there is, as it stays when more comes."""
        output = self._local.output(name, text, stream.sequences)
        return replace(output, outputs=[replace(each, token_ids=list(each.token_ids)) for each in output.outputs])


def _given(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError("There is no tokenizer: skip_tokenizer_init was set.")
    return tokenizer


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
