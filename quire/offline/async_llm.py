"""`AsyncLLM`: an engine in this process whose outputs stream to coroutines. Names are vLLM's.

Each message of the engine's thread hops to the event loop once, where tokens become text. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Unpack

from quire.errors import EngineDeadError, GenerationError
from quire.foundation.config import BUILTIN_MODEL
from quire.foundation.messages.from_engine import Deltas, Done, FromEngine
from quire.foundation.messages.to_engine import Adapter, Control, PauseMode
from quire.offline.adapters import LoRARequest, adapter_of, load_command
from quire.offline.engine_settings import AsyncEngineSettings
from quire.offline.engine_thread import CLOSED, EngineThread
from quire.offline.open_streams import OpenStream, OpenStreams
from quire.offline.pooled_requests import params_of, pooled_output, pooled_sequence
from quire.offline.prompts import ConversationRenderer, Message, ParsedPrompt, Prompt, parse_prompt
from quire.offline.signature import LOG_SETTINGS, shows_settings
from quire.offline.texts import TextOptions, texts_of
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams, PoolingTask
from quire.sampling_params import SamplingParams
from quire.text.sequence_accumulator import SequenceAccumulator
from quire.text.tokenizer import Tokenizer


class AsyncEngineArgs:
    """The model and settings of an AsyncLLM, for `AsyncLLM.from_engine_args`."""

    @shows_settings(*LOG_SETTINGS)
    def __init__(self, model: str = BUILTIN_MODEL, **settings: Unpack[AsyncEngineSettings]) -> None:
        self.model = model
        self.settings: AsyncEngineSettings = settings


EngineArgs = AsyncEngineArgs
"""vLLM's name for the arguments of an engine that is not asynchronous."""


class AsyncLLM:
    """A model, ready to generate, or to make vectors of texts, for many coroutines of one event loop at a time. It may
    change to another loop when no request is open. After a fork, the child process needs an AsyncLLM of its own.

    Arguments, `startup` and errors are those of LLM.
    """

    @shows_settings(*LOG_SETTINGS)
    def __init__(self, model: str = BUILTIN_MODEL, **settings: Unpack[AsyncEngineSettings]) -> None:
        self._controls: dict[int, asyncio.Future[Done]] = {}
        self._control_ids = itertools.count(1)
        self._attaching = threading.Lock()  # threads with an event loop each may try at the same time
        self._adapters: dict[LoRARequest, asyncio.Task[Adapter]] = {}  # loaded, or being loaded
        self._preparing = ThreadPoolExecutor(1, "prompts")  # long prompts and new grammars take their time
        self._engine = EngineThread(model, settings, self._take, self._fail)
        self._local = self._engine.local
        self._streams = OpenStreams(self._local.client.send)
        self.startup = self._local.startup
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Make an AsyncLLM of these arguments."""
        return cls(engine_args.model, **engine_args.settings)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt as they grow; the last one is `finished`.

        Each output has everything so far. With `output_kind` DELTA it has what is new, for the sequences with anything
        new; with FINAL_ONLY there is only the last output. Closing the generator early aborts its sequences.

        Args:
            prompt: See `LLM.generate`.
            sampling_params: Default: the model's own defaults.
            request_id: For `abort`, and in the outputs; no two open requests have the same. Made up where left out.
            lora_request: An adapter, with enable_lora=True. It is loaded when it is first asked for, while others run.
            priority: Lower goes first; with scheduling_policy="priority" only.

        Raises:
            RequestError: The prompt, its parameters or its adapter cannot be served.
            GenerationError: The request failed.
            EngineDeadError: A step failed, `shutdown` was called, or this is a fork of the process that made it.
        """
        return self._generate(
            lambda: parse_prompt(prompt, self._local.tokenizer, self._local.media),
            sampling_params,
            request_id,
            lora_request,
            priority,
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a conversation as they grow, as from `generate`. The model's chat template renders it.

        Messages, further `options` from `add_generation_prompt` on, and their errors are those of `LLM.chat`; other
        arguments and errors are those of `generate`.
        """

        def render() -> ParsedPrompt:
            return ConversationRenderer(self._local.text, media=self._local.media, **options).prompt(messages)

        return self._generate(render, sampling_params, request_id, lora_request, priority)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """The one output of a text: what the model makes of it by a task, a tensor as from `LLM.encode`.

        Args:
            pooling_task: See PoolingTask; by default that of `pooling_params`, or else the model's first.
            truncate_prompt_tokens: Use only so many tokens of the text; -1 for as many as fit; by default a text that
                is too long is refused.
            tokenization_kwargs: May have `truncation`, `max_length` and `add_special_tokens`.

        Other arguments and errors are those of `generate`.
        """
        options = TextOptions.of(truncate_prompt_tokens, tokenization_kwargs)
        params = params_of(pooling_params, pooling_task, self._local.pooling)

        def prepare(adapter: Adapter | None) -> tuple[str | None, list[SequenceAccumulator]]:
            (text,) = texts_of(self._local, self._local.pooling, [prompt], options)
            return None, [pooled_sequence(self._local, text, params, priority, adapter)]

        async with self._opened(prepare, request_id, lora_request) as stream:
            while not stream.finished:
                await stream.next()
            yield pooled_output(stream.name, stream.sequences[0])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now. Their streams end with finish_reason `abort`. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._streams.abort(name)

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Generate nothing until `resume_generation`; new requests are taken, and wait. Returns when nothing runs.
        Raises GenerationError if generation was resumed while something still ran.

        Args:
            mode: What happens to requests that run: `abort` ends them, `wait` waits for them, `keep` lets them go on
                later.
            wait_for_inflight_requests: Older name of mode="wait".
            clear_cache: Forget cached prefixes; never with mode="keep".
        """
        mode = "wait" if wait_for_inflight_requests else mode
        await self._control(f"pause:{mode}")
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self._control("resume")

    async def is_paused(self) -> bool:
        """Whether `pause_generation` was called, and no `resume_generation` since."""
        return bool((await self._control("is_paused")).value["paused"])

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request is open. Raises TimeoutError if some are still open after `drain_timeout` seconds."""
        async with asyncio.timeout(drain_timeout):
            await self._streams.wait_none()

    async def reset_prefix_cache(self) -> bool:
        """Forget what is cached of earlier prompts."""
        await self._control("reset_prefix_cache")
        return True

    async def counts(self) -> dict[str, int]:
        """What the engine holds, for leak tests."""
        return (await self._control("counts")).value

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request asks for it. Raises RequestError if the adapter cannot be served; the
        message names the tensor."""
        await self._adapter(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapters of this `lora_int_id`; running requests keep theirs. Returns whether there were any."""
        own = [each for each in self._adapters.items() if each[0].lora_int_id == lora_id and _is_loaded(each[1])]
        for asked, _ in own:
            del self._adapters[asked]
            await self._command("unload_adapter", {"name": asked.lora_name})
        return bool(own)

    async def list_loras(self) -> set[int]:
        """The `lora_int_id` of adapters that are loaded."""
        return {asked.lora_int_id for asked, loading in self._adapters.items() if _is_loaded(loading)}

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is no longer there."""
        if (failure := self._engine.failure) is not None:
            raise failure

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ConfigError if skip_tokenizer_init left it out."""
        return self._local.tokenizer()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return self._engine.failure is None

    @property
    def errored(self) -> bool:
        """Whether the engine takes no more requests."""
        return self._engine.failure is not None

    @property
    def dead_error(self) -> Exception:
        """Why the engine takes no more requests."""
        return self._engine.failure or EngineDeadError(CLOSED)

    def shutdown(self) -> None:
        """Free the engine; open requests end with EngineDeadError. So does the process's exit. A call in a fork of the
        process does nothing."""
        atexit.unregister(self.shutdown)
        self._engine.close()
        self._preparing.shutdown(wait=False)

    # --- one request ------------------------------------------------------------------------------------------------

    async def _generate(
        self,
        parse: Callable[[], ParsedPrompt],
        params: SamplingParams | None,
        name: str | None,
        lora_request: LoRARequest | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        def prepare(adapter: Adapter | None) -> tuple[str | None, list[SequenceAccumulator]]:
            asked = params or SamplingParams(**self._local.text.defaults.fill({}))
            prompt = parse()
            return prompt.text, self._local.sequences(prompt, asked, priority, adapter)

        async with self._opened(prepare, name, lora_request) as stream:
            while True:
                await stream.next()
                finished = stream.finished
                output = stream.output(self._local)
                if output is not None:
                    yield output
                if finished:
                    return

    @asynccontextmanager
    async def _opened(
        self,
        prepare: Callable[[Adapter | None], tuple[str | None, list[SequenceAccumulator]]],
        name: str | None,
        lora_request: LoRARequest | None,
    ) -> AsyncIterator[OpenStream]:
        """The stream of a request, which is aborted if it is left before its end."""
        with self._attaching:
            self._attach()
        adapter = None if lora_request is None else await self._adapter(lora_request)
        text, sequences = await asyncio.get_running_loop().run_in_executor(self._preparing, prepare, adapter)
        with self._attaching:
            self._attach()  # another event loop may have been here meanwhile
            stream = self._streams.submit(name, text, sequences)
        try:
            yield stream
        finally:
            self._streams.leave(stream, engine_lives=self._engine.failure is None)

    async def _adapter(self, asked: LoRARequest) -> Adapter:
        """The adapter, loaded once however many requests ask for it at the same time. Raises RequestError if it cannot
        be served; the next request for it tries again."""
        loading = self._adapters.get(asked)
        if loading is None or (loading.done() and not _is_loaded(loading)):
            loading = self._adapters[asked] = asyncio.create_task(self._load_adapter(asked))
        return await asyncio.shield(loading)

    async def _load_adapter(self, asked: LoRARequest) -> Adapter:
        return adapter_of(await self._command(*load_command(asked)))

    # --- what the engine says, in the event loop ----------------------------------------------------------------------

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Done):
            waiting = self._controls.pop(message.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, Deltas):
            self._streams.take(message)

    def _fail(self, failure: Exception) -> None:
        """End everything that waits for the engine, because the engine is gone."""
        self._streams.fail(failure)
        for waiting in self._controls.values():
            if not waiting.done():
                waiting.set_exception(failure)
        self._controls.clear()

    async def _control(self, action: str) -> Done:
        done = await self._command(action, {})
        if done.error:
            raise GenerationError(f"{done.error}.")
        return done

    async def _command(self, action: str, value: dict[str, Any]) -> Done:
        """Send the engine a command, and wait for its answer, which may be an error."""
        number = next(self._control_ids)
        waiting: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        with self._attaching:
            self._attach()
            self._controls[number] = waiting
        self._local.client.send(Control(number, action, value))
        return await waiting

    def _attach(self) -> None:
        self._engine.attach(idle=not self._streams and not self._controls)


def _is_loaded(loading: asyncio.Task[Adapter]) -> bool:
    return loading.done() and not loading.cancelled() and loading.exception() is None


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
