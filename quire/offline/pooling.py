"""The methods of `LLM` that make vectors and values of whole texts. Names and meanings are vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.errors import RequestError
from quire.foundation.messages.from_engine import End, PoolingInfo
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.garbage import rare_collection
from quire.offline.adapters import LoRARequest, for_each
from quire.offline.local_engine import LocalEngine
from quire.offline.pooled_requests import end_of, params_of, pooled_sequence, tensor_of, values_of
from quire.offline.progress_bar import shown_bar
from quire.offline.prompts import Prompt, as_prompts
from quire.offline.run import OfflineMetrics, OfflineRun
from quire.offline.texts import PooledText, TextOptions, pairs_of, texts_of
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.planning.step_limits import StepLimits
from quire.pooling_params import PoolingParams, PoolingTask
from quire.text.sequence_accumulator import SequenceAccumulator
from quire.text.similarities import SIMILARITIES, max_sim

if TYPE_CHECKING:
    pass

Params = PoolingParams | Sequence[PoolingParams] | None
Loras = LoRARequest | Sequence[LoRARequest | None] | None


class PoolingMethods:
    """What `LLM` makes of whole texts, on the engine of its `_local`.

    Arguments that methods share:

    - `prompts`: one prompt or several. A list of integers is one prompt of token ids.
    - `pooling_params`: one for all, or one for each prompt; its task is the method's.
    - `truncate_prompt_tokens`: use only so many tokens of each text; -1 for as many as fit. By default texts that are
      too long are refused. `tokenization_kwargs` may have `truncation`, `max_length` and `add_special_tokens`.
    - `lora_request`: an adapter for all, or one for each prompt, None for the base model; with enable_lora=True.
    - `use_tqdm`: show a progress bar, on a terminal or in a notebook.

    All raise RequestError for what cannot be served, and EngineDeadError as `generate` does.
    """

    _local: LocalEngine
    _numbers: itertools.count[int]
    _metrics: OfflineMetrics | None

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Loras = None,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Return what the model makes of each text by a task, as tensors: [dim] or [labels] float32, and [tokens, …]
        for tasks of tokens.

        Args:
            pooling_task: See PoolingTask; by default that of `pooling_params`, or else the model's first.
        """
        texts = self._texts(prompts, TextOptions.of(truncate_prompt_tokens, tokenization_kwargs))
        ended = self._pool(texts, self._params(pooling_params, len(texts), pooling_task), use_tqdm, lora_request)
        return [self._output(PoolingRequestOutput, PoolingOutput(tensor_of(end)), add, end) for add, end in ended]

    @rare_collection()
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: Loras = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each text.

        Args:
            prompt_name: Put the model's prompt of this name before each text, as sentence-transformers does. By default
                the model's default prompt, if it has one.
            prompt: Put this text before each text instead; "" for nothing.
        """
        options = TextOptions.of(truncate_prompt_tokens, tokenization_kwargs, prompt_name, prompt)
        texts = self._texts(prompts, options)
        made: dict[int, EmbeddingOutput] = {}

        def make(sequence: SequenceAccumulator) -> None:
            made[sequence.add.id] = EmbeddingOutput(values_of(end_of(sequence.end)).tolist())

        params = self._params(pooling_params, len(texts), "embed")
        ended = self._pool(texts, params, use_tqdm, lora_request, make)
        return [self._output(EmbeddingRequestOutput, made[add.id], add, end) for add, end in ended]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each label for each text."""
        texts = self._texts(prompts, TextOptions.of(truncate_prompt_tokens, tokenization_kwargs))
        ended = self._pool(texts, self._params(pooling_params, len(texts), "classify"), use_tqdm, lora_request)
        return [
            self._output(ClassificationRequestOutput, ClassificationOutput(values_of(end).tolist()), add, end)
            for add, end in ended
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: Loras = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Return a reward model's values of each text as they are: those of its tokens, or that of the whole text."""
        task: PoolingTask = "classify" if "token_classify" not in self._info.tasks else "token_classify"
        given = pooling_params or PoolingParams(use_activation=False)
        return self.encode(
            prompts,
            given,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=task,
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_2` fits that of `data_1`, which may be one for all: a cross-encoder's
        score, or how similar the embeddings are, or those of their tokens.

        Args:
            chat_template: Makes one text of a pair, which has the roles `query` and `document`; by default the model's,
                if it has these roles.
        """
        first, second = _texts_of_pair(data_1, data_2)
        options = TextOptions.of(truncate_prompt_tokens, tokenization_kwargs)
        if "score" not in self._info.tasks:
            return self._similarities(first, second, options, pooling_params, use_tqdm, lora_request)
        with self._local.exclusive():
            texts = pairs_of(self._local, self._info, list(zip(first, second, strict=True)), options, chat_template)
        ended = self._pool(texts, self._params(pooling_params, len(texts), "score"), use_tqdm, lora_request)
        return [
            self._output(ScoringRequestOutput, ScoringOutput(float(values_of(end)[0])), add, end) for add, end in ended
        ]

    # --- one batch of texts -------------------------------------------------------------------------------------------

    @property
    def _info(self) -> PoolingInfo:
        return self._local.pooling

    def _texts(self, prompts: Prompt | Sequence[Prompt], options: TextOptions) -> list[PooledText]:
        with self._local.exclusive():
            return texts_of(self._local, self._info, as_prompts(prompts), options)

    def _params(self, given: Params, count: int, task: PoolingTask | None) -> list[PoolingParams]:
        several = [given or PoolingParams()] * count if given is None or isinstance(given, PoolingParams) else given
        if not isinstance(several, list | tuple) or not all(isinstance(each, PoolingParams) for each in several):
            raise RequestError("pooling_params must be PoolingParams, or a list of them.", param="pooling_params")
        if len(several) != count:
            raise RequestError(f"{count} prompts need one PoolingParams or {count}, got {len(several)}.",
                               param="pooling_params")  # fmt: skip
        return [params_of(each, task, self._info) for each in several]

    @rare_collection()
    def _pool(
        self,
        texts: Sequence[PooledText],
        params: Sequence[PoolingParams],
        use_tqdm: bool,
        lora_request: Loras,
        ended: Callable[[SequenceAccumulator], None] | None = None,
    ) -> list[tuple[Add, End]]:
        """Submit all texts and wait for their vectors. `ended` is called with each while the device computes others."""
        sequences = []
        with ExitStack() as stack:
            stack.enter_context(self._local.exclusive())
            adapters = self._local.adapters.load_all(for_each(lora_request, len(texts)))
            bar = shown_bar(len(texts)) if use_tqdm else None
            if bar is not None:
                stack.enter_context(bar)
            head_start = StepLimits.of(self._local.config).tokens
            run = stack.enter_context(OfflineRun(self._local.client, head_start, bar, self._metrics, ended))
            for text, each, adapter in zip(texts, params, adapters, strict=True):
                sequences.append(pooled_sequence(self._local, text, each, adapter=adapter))
                run.submit(sequences[-1:])
            run.finish()
        return [(sequence.add, end_of(sequence.end)) for sequence in sequences]

    def _similarities(
        self,
        first: Sequence[str],
        second: Sequence[str],
        options: TextOptions,
        params: PoolingParams | None,
        use_tqdm: bool,
        lora_request: Loras,
    ) -> list[ScoringRequestOutput]:
        """Compare embeddings of texts; equal texts are embedded once."""
        each = {text: place for place, text in enumerate(dict.fromkeys([*first, *second]))}
        texts = self._texts(list(each), options)
        task: PoolingTask = "token_embed" if "embed" not in self._info.tasks else "embed"
        ended = self._pool(texts, self._params(params, len(texts), task), use_tqdm, lora_request)
        compare = SIMILARITIES[self._info.similarity] if task == "embed" else max_sim
        vectors = [values_of(end).astype("f8") for _, end in ended]
        found = []
        for one, other in zip(first, second, strict=True):
            (left, _), (right, end) = ended[each[one]], ended[each[other]]
            score = compare(vectors[each[one]], vectors[each[other]])
            both = replace(left, tokens=[*left.tokens, *right.tokens])
            found.append(self._output(ScoringRequestOutput, ScoringOutput(score), both, end))
        return found

    def _output(self, kind: Callable[..., Any], output: Any, add: Add, end: End) -> Any:
        return kind(str(next(self._numbers)), output, add.tokens, end.cached_tokens)


def _texts_of_pair(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    """Return the texts of both sides, as many of each."""
    first, second = ([data] if isinstance(data, str) else data for data in (data_1, data_2))
    for name, texts in (("data_1", first), ("data_2", second)):
        if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name} must be a text or a list of texts.", param=name)
    if len(first) not in (1, len(second)):
        raise RequestError(f"data_1 has {len(first)} texts and data_2 {len(second)}: give one, or as many.",
                           param="data_1")  # fmt: skip
    return list(first) * (len(second) if len(first) == 1 else 1), list(second)
