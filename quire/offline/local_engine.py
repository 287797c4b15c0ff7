"""An engine in this process, the way from a prompt to its sequences, and the way from these to an output: what `LLM`,
`AsyncLLM` and `LLMEngine` share.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any

import msgspec

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.engine.input_processor import InputProcessor
from quire.engine.structured_output.checker import GrammarChecker
from quire.engine.thinking_budgets import bitmask_source
from quire.errors import ConfigError, EngineDeadError, RequestError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config, ServerConfig, environment
from quire.foundation.config.server import LOGS_OF_SERVER, OF_ENGINES_IN_PROCESS
from quire.foundation.config.vllm_checks import check_vllm_setting, meant_value
from quire.foundation.config.vllm_compat import VLLM_SETTINGS
from quire.foundation.messages.from_engine import Ready
from quire.foundation.messages.to_engine import Adapter, Add
from quire.foundation.processes.notebook import is_notebook
from quire.logits_processors import import_path
from quire.offline.adapters import LocalAdapters
from quire.offline.media import LocalMedia
from quire.offline.prompts import ParsedPrompt
from quire.outputs import RequestOutput
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from quire.sampling_params import SamplingParams
from quire.text.model_text import load_model_text
from quire.text.output_parsers.call_grammar import reasoning_in_front
from quire.text.output_parsers.detection import detect_reasoning_parser
from quire.text.output_parsers.formats import Turn
from quire.text.sequence_accumulator import SequenceAccumulator
from quire.text.text_stream import ChoiceState
from quire.text.thinking_budget import thinking_budget
from quire.text.tokenizer import Tokenizer, bad_word_tokens
from quire.version import __version__

_log = logging.getLogger(__name__)


class LocalEngine:
    """A loaded model, in the thread that will run its loop; see LLM for the model, its settings and errors. `kind` is
    the class of the object that it is part of, for messages, and `performance_mode` the mode if the settings name none;
    None for the server's default."""

    def __init__(self, kind: str, model: str, settings: Mapping[str, Any], performance_mode: str | None = None) -> None:
        self._kind = kind
        self._process = os.getpid()
        self._lock = threading.RLock()
        began = time.monotonic()
        config = environment.apply(Config().with_values(model=model, **_known(settings)))
        if config.scheduler.performance_mode is None and performance_mode is not None:
            config = config.with_values(performance_mode=performance_mode)
        resolved = resolve(config)
        self.config = resolved.config
        self.text = load_model_text(self.config)
        self.media = LocalMedia(self.config)
        runtime_info, clock = build_model_runtime_info(self.config, resolved.spec), SystemClock()
        self.client = InProcessClient(
            self.config,
            build_executor(self.config, clock),
            clock,
            runtime_info,
            bitmask_source(self.config, resolved.spec.vocab_size),
        )
        self._grammars = GrammarChecker(self.text.special_tokens)
        self.adapters = LocalAdapters(self.client)
        ready = self.client.receive(None)
        assert isinstance(ready, Ready)
        self.startup: dict[str, float] = ready.startup
        self.pooling = ready.pooling
        if is_notebook():
            print(self._report(ready, time.monotonic() - began), file=sys.stderr, flush=True)
        seeds = random.Random(self.config.model.seed)
        self.input_processor = InputProcessor(
            self.client.number,
            ready,
            self.text.eos_ids,
            self.config.model.max_logprobs,
            self.config.scheduler.scheduling_policy,
            clock,
            lambda: seeds.getrandbits(64),
            takes_extra_args=bool(self.config.model.logits_processors),
        )

    def _report(self, ready: Ready, seconds: float) -> str:
        """The line about a start, for a notebook."""
        model, device = self.config.model, self.config.device.device
        return (
            f"Quire {__version__}: {model.model} in {model.dtype} on {device}, ready in {seconds:.1f} s. Sequences of "
            f"up to {min(ready.max_model_len, ready.capacity):,} tokens; the KV cache holds {ready.kv_tokens:,}."
        )

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the engine cannot be used: it was shut down, or belongs to the process that this one was forked from."""
        if os.getpid() != self._process:
            return EngineDeadError(
                f"This {self._kind} was made in process {self._process}, and works only there: create a new one in "
                "this process."
            )
        return EngineDeadError(self.client.ended) if self.client.ended else None

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ConfigError if skip_tokenizer_init left it out."""
        if self.text.tokenizer is None:
            raise ConfigError("There is no tokenizer: skip_tokenizer_init was set.")
        return self.text.tokenizer

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let no other thread use the engine within this context. Threads wait for their turn. Raises EngineDeadError
        if the engine cannot be used, see `failure`."""
        self._raise_failure()  # at once: in a fork nobody may be left to release the lock
        with self._lock:
            self._raise_failure()
            yield

    def close(self) -> None:
        """Free the engine. A call that uses it in another thread ends with EngineDeadError first."""
        if os.getpid() != self._process:
            return
        self.client.end(f"The engine was shut down. Create a new {self._kind}.")
        with self._lock:
            self.client.close()
            self._grammars.close()

    def sequences(
        self, prompt: ParsedPrompt, params: SamplingParams, priority: int = 0, adapter: Adapter | None = None
    ) -> list[SequenceAccumulator]:
        """The sequences of a prompt, not submitted yet. The first one's Add has all of them. Raises RequestError if the
        prompt or its parameters cannot be served."""
        if not isinstance(params, SamplingParams):
            raise no_sampling_params(params)
        tokenizer = self.text.tokenizer
        if tokenizer is None and params.detokenize:
            params = msgspec.structs.replace(params, detokenize=False)
        adds = self.input_processor.adds(
            prompt.tokens,
            params,
            priority=priority,
            cache_salt=prompt.cache_salt,
            bad_words=bad_word_tokens(tokenizer, params.bad_words),
            grammar=self._grammar(params, prompt.turn),
            thinking=thinking_budget(params.thinking_token_budget, self._reasoning(params), tokenizer, prompt.turn),
            adapter=adapter,
            media=prompt.media,
            source=prompt.source,
        )
        return [self.sequence(add, index) for index, add in enumerate(adds)]

    def sequence(self, add: Add, index: int) -> SequenceAccumulator:
        return SequenceAccumulator(add, index, ChoiceState(add, self.text.tokenizer))

    def output(
        self, request_id: str, text: str | None, sequences: Sequence[SequenceAccumulator], *, only_new: bool = False
    ) -> RequestOutput:
        """What the sequences of a prompt have brought; with `only_new`, what is new since the last call, without
        sequences that brought nothing.
        """
        first, tokenizer = sequences[0], self.text.tokenizer
        scored = None if only_new and not first.whole.prompt_logprobs else first.prompt_logprobs(tokenizer)
        outputs = [each.gained(tokenizer) if only_new else each.output(tokenizer) for each in sequences]
        return RequestOutput(
            request_id,
            text,
            first.add.tokens,
            [output for output in outputs if output is not None],
            finished=all(sequence.choice.finished for sequence in sequences),
            prompt_logprobs=scored,
            num_cached_tokens=first.choice.cached_tokens,
        )

    def _raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise failure

    def _grammar(self, params: SamplingParams, turn: Turn | None) -> str:
        asked = params.structured_outputs
        if asked is None:
            return ""
        if self.text.tokenizer is None:
            raise asked.error("there is no tokenizer: skip_tokenizer_init was set.")
        behind = ""
        if turn is not None:
            behind = reasoning_in_front(self._reasoning_parser, turn, self.text.special_tokens)
        return self._grammars.check(asked, behind).grammar

    def _reasoning(self, params: SamplingParams) -> str | None:
        """The reasoning parser, if a request needs it: finding it loads the chat template."""
        return None if params.thinking_token_budget is None else self._reasoning_parser

    @cached_property
    def _reasoning_parser(self) -> str | None:
        named, template = self.config.server.reasoning_parser, self.text.chat_template
        if named is not None or template is None:
            return named
        return detect_reasoning_parser(template.source).name


def no_sampling_params(value: Any) -> RequestError:
    """The error about a value that is passed in place of SamplingParams."""
    advice = ": write SamplingParams(**values)" if isinstance(value, Mapping) else ""
    return RequestError(f"sampling_params must be SamplingParams, got {type(value).__name__}{advice}.",
                        param="sampling_params")  # fmt: skip


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that have no effect here. Raises ConfigError for one that is not supported here."""
    for name in sorted(settings.keys() & VLLM_SETTINGS.keys()):
        _log.warning("%s", check_vllm_setting(name, settings[name], name))
    of_server = {each.name for each in fields(ServerConfig)} - {*OF_ENGINES_IN_PROCESS}
    for name in settings.keys() & of_server:
        if name not in LOGS_OF_SERVER:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name} is of a server alone (quire serve {flag}): leave it out.", param=name)
        if settings[name] is not LOGS_OF_SERVER[name]:
            _log.warning("%s=%r has no effect: only a server logs that.", name, settings[name])
    ours = settings.keys() - VLLM_SETTINGS.keys() - of_server
    known = {name: meant_value(name, value) for name, value in settings.items() if name in ours}
    if isinstance(processors := known.get("logits_processors"), list | tuple):
        known["logits_processors"] = tuple(import_path(each) for each in processors)
    return known
