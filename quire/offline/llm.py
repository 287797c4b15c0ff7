"""`LLM`: offline inference. Prompts in, finished outputs back, on an engine in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from quire.errors import ConfigError, RequestError, did_you_mean
from quire.foundation.config import BUILTIN_MODEL
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import Adapter, Control
from quire.foundation.messages.workers import TokenLogprobs
from quire.foundation.processes.garbage import rare_collection
from quire.offline.adapters import LoRARequest, for_each
from quire.offline.engine_settings import EngineSettings
from quire.offline.local_engine import LocalEngine, no_sampling_params
from quire.offline.pooling import PoolingMethods
from quire.offline.progress_bar import shown_bar
from quire.offline.prompts import (
    ConversationRenderer,
    Message,
    ParsedPrompt,
    Prompt,
    as_conversations,
    as_prompts,
    parse_prompt,
)
from quire.offline.run import OfflineMetrics, OfflineRun
from quire.offline.signature import shows_settings
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.planning.step_limits import StepLimits
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.text.beam_search import BatchedBeamSearch
from quire.text.sequence_accumulator import SequenceAccumulator
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.metrics.reader import Metric


_ABSENT = {
    "sleep": " Free the memory with close(), and make another LLM later.",
    "wake_up": " Make another LLM.",
    "collective_rpc": " Processes of an engine take no calls: see logits_processors for code of your own in it.",
    "apply_model": " Processes of an engine take no calls: see logits_processors for code of your own in it.",
    "llm_engine": " LLMEngine is an engine that its caller steps.",
}
"""What to do instead of calling a method of vLLM's."""


class LLM(PoolingMethods):
    """A model, ready to generate, or to make vectors and labels of texts (`embed`, `classify`, `score`, `encode`).

    Threads may share an LLM: their calls run one after the other, each with all its prompts. `AsyncLLM` runs requests
    of many callers together. After a fork, the child process needs an LLM of its own.

    Args:
        model: A directory with a Hugging Face checkpoint, a hub id, or the built-in model (the default).
        disable_log_stats: False for `get_metrics`; counting takes some microseconds for each sequence and step.
        **settings: Settings of `quire serve`, under their flags' names with underscores; not those of the server alone.
            Values may be texts as on the command line ("8k").

    Attributes:
        startup: Seconds of the engine's start, by stage.

    Raises:
        ConfigError: An unknown or unsupported setting; the message names it.
        SetupError: The model cannot be served.
    """

    @shows_settings()
    def __init__(
        self, model: str = BUILTIN_MODEL, *, disable_log_stats: bool = True, **settings: Unpack[EngineSettings]
    ) -> None:
        self._local = LocalEngine("LLM", model, settings, "throughput")
        self._config, self._text, self._engine = self._local.config, self._local.text, self._local.client
        self._input_processor = self._local.input_processor
        self.startup: dict[str, float] = self._local.startup
        self._numbers = itertools.count()  # of requests
        self._metrics = None if disable_log_stats else OfflineMetrics(self._local)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the order of the prompts.

        Args:
            prompts: One prompt or several. A list of integers is one prompt of token ids.
            sampling_params: One for all, or one for each prompt. Default: the model's own defaults.
            use_tqdm: Show a progress bar, on a terminal or in a notebook.
            lora_request: An adapter for all, or one for each prompt, None for the base model; with enable_lora=True.
            priority: One number for each prompt, lower goes first; with scheduling_policy="priority" only.

        Raises:
            RequestError: A prompt or its parameters cannot be served; the others are aborted.
            EngineDeadError: `close` was called, maybe during this call; an earlier call failed or was interrupted in
                the middle of a step; or this is a fork of the process that made the LLM. Create a new LLM.
        """
        several = as_prompts(prompts)
        params = self._params_for(len(several), sampling_params)
        if priority is not None and (not isinstance(priority, Sequence) or len(priority) != len(several)):
            raise RequestError(f"{len(several)} prompts need a list of as many priorities.", param="priority")
        parsed = (parse_prompt(prompt, self._local.tokenizer, self._local.media) for prompt in several)
        return self._run(parsed, params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each rendered by the model's chat template; see `generate`.

        Args:
            messages: One conversation or several, as plain data; arguments of earlier tool calls are objects, not text.
            sampling_params, use_tqdm, lora_request: See `generate`.
            add_generation_prompt: End the prompt with the opening of an answer.
            continue_final_message: Go on with the last message instead.
            chat_template: Another template than the model's, as jinja source.
            tools: What the model may call, as in OpenAI's API. Calls are part of the output's text, in the model's
                format; `quire.text.output_parsers` reads them.
            chat_template_kwargs: Variables of the template.

        Raises:
            ConfigError: The model has neither a chat template nor, by skip_tokenizer_init, a tokenizer.
            CheckpointError: `chat_template` is no jinja template.
            RequestError: The template refuses the messages.
        """
        renderer = ConversationRenderer(
            self._text,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            media=self._local.media,
        )
        prompts = list(map(renderer.prompt, as_conversations(messages)))
        return self._run(prompts, self._params_for(len(prompts), sampling_params), use_tqdm, lora_request)

    @rare_collection()
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences of each prompt within the beam. Tokens and text begin with the prompt's.

        Args:
            prompts: See `generate`.
            params: The same for all prompts.
            lora_request: See `generate`.
            concurrency_limit: Maximum prompts that are searched at once; by default all.

        Raises:
            RequestError: A prompt, the parameters or an adapter cannot be served; nothing was computed.
            EngineDeadError: See `generate`.
        """
        with self._local.exclusive():
            self._check_beams(params)
            parsed = [parse_prompt(prompt, self._local.tokenizer).tokens for prompt in as_prompts(prompts)]
            for tokens in parsed:
                self._input_processor.adds(
                    tokens, SamplingParams(max_tokens=params.max_tokens)
                )  # raises if it does not fit
            adapters = self._local.adapters.load_all(for_each(lora_request, len(parsed)))
            found: list[BeamSearchOutput] = []
            tokenizer, step = self._text.tokenizer, params.step()
            at_once = concurrency_limit or max(1, len(parsed))
            for start in range(0, len(parsed), at_once):
                search = BatchedBeamSearch(parsed[start : start + at_once], params, self._text.eos_ids)
                while not search.done:
                    own = [adapters[start + place] for place in search.prompts_of_queries]
                    search.extend(self._next_tokens(search.queries, step, own))
                for sequences in search.results():
                    texts = [None if tokenizer is None else tokenizer.decode(s.tokens) for s in sequences]
                    found.append(BeamSearchOutput([replace(s, text=t) for s, t in zip(sequences, texts, strict=True)]))
            return found

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ConfigError if skip_tokenizer_init left it out."""
        return self._local.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that `generate` uses by default, from the model's generation_config.json."""
        return SamplingParams(**self._text.defaults.fill({}))

    def get_metrics(self) -> list[Metric]:
        """Return the metrics that a server's /metrics shows as `vllm:…`, since the start: Counter, Gauge and Histogram
        objects (`quire.engine.metrics.reader`). Raises ConfigError if the LLM was made without disable_log_stats=False,
        and EngineDeadError as `generate` does."""
        if self._metrics is None:
            raise ConfigError("get_metrics() needs LLM(disable_log_stats=False).", param="disable_log_stats")
        with self._local.exclusive():
            return self._metrics.read()

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached of earlier prompts. Raises EngineDeadError as `generate` does."""
        with self._local.exclusive():
            self._engine.send(Control(0, "reset_prefix_cache"))
            while not isinstance(self._engine.receive(None), Done):
                pass  # the last tokens of aborted requests
        return True

    if not TYPE_CHECKING:  # a type checker knows the methods that there are

        def __getattr__(self, name: str) -> Any:
            advice = _ABSENT.get(name, did_you_mean(name, vars(LLM)))
            raise AttributeError(f"LLM has no '{name}'.{advice}")

    def close(self) -> None:
        """Free the engine; the object cannot generate afterwards. Calls that run in other threads end with
        EngineDeadError. In a fork of the process that made the LLM, nothing happens."""
        self._local.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one batch of requests --------------------------------------------------------------------------------------

    @rare_collection()
    def _run(
        self,
        prompts: Iterable[ParsedPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Submit all prompts, wait until each sequence has ended, and assemble the outputs."""
        requests: list[tuple[str | None, list[SequenceAccumulator]]] = []
        head_start = StepLimits.of(self._config).tokens if priority is None else None
        with ExitStack() as stack:
            stack.enter_context(self._local.exclusive())
            adapters = self._local.adapters.load_all(for_each(lora_request, len(params)))
            each_has = zip(prompts, params, priority or [0] * len(params), adapters, strict=True)
            total = sum(each.n for each in params)
            bar = shown_bar(total) if use_tqdm else None
            if bar is not None:
                stack.enter_context(bar)
            run = stack.enter_context(OfflineRun(self._engine, head_start, bar, self._metrics))
            for prompt, each, rank, adapter in each_has:
                sequences = self._local.sequences(prompt, each, rank, adapter)
                run.submit(sequences)
                requests.append((prompt.text, sequences))
            run.finish()
            return [self._local.output(str(next(self._numbers)), text, sequences) for text, sequences in requests]

    def _next_tokens(
        self, sequences: Sequence[Sequence[int]], params: SamplingParams, adapters: Sequence[Adapter | None]
    ) -> list[TokenLogprobs]:
        """The likeliest next tokens of each sequence with its adapter, for one step of beam search."""
        adds = [
            self._input_processor.adds(tokens, params, adapter=adapter)[0]
            for tokens, adapter in zip(sequences, adapters, strict=True)
        ]
        gathered = [self._local.sequence(add, 0) for add in adds]
        with OfflineRun(self._engine, metrics=self._metrics) as run:
            for sequence in gathered:
                run.submit([sequence])
            run.finish()
        return [sequence.whole.logprobs[0] for sequence in gathered]

    def _check_beams(self, params: BeamSearchParams) -> None:
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}.", param="params")
        model = self._config.model
        if model.logprobs_mode.endswith("logits"):
            raise RequestError("beam search needs log probabilities: leave logprobs_mode out.", param="beam_width")
        if 0 <= model.max_logprobs < 2 * params.beam_width:
            raise RequestError(
                f"beam_width must be at most {model.max_logprobs // 2}, half of max_logprobs here; "
                f"got {params.beam_width}.",
                param="beam_width",
            )

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            given = [given] * count
        if not isinstance(given, list | tuple):
            raise no_sampling_params(given)
        if len(given) != count:
            raise RequestError(f"{count} prompts need one sampling_params or {count}, got {len(given)}.")
        for each in given:
            if not isinstance(each, SamplingParams):
                raise no_sampling_params(each)
        return given
