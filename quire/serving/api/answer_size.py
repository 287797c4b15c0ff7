"""How large an answer may get that is made as a whole: estimated from the request, before anything runs for it.

An answer repeats its prompt for each of n choices, and log probabilities multiply every position: a few numbers in a
small request would make gigabytes. Knows nothing about how answers are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import RequestError
from quire.sampling_params import SamplingParams

MAX_ENTRIES = 2**22
"""Log probabilities and tokens of prompts in one answer: as JSON some 200 to 400 MB."""


def check_answer_size(
    prompt_lens: Sequence[int],
    params: SamplingParams,
    *,
    num_choices: int,
    longest: int,
    prompts_shown: int,
    held: bool,
) -> None:
    """Refuse what would be answered with too much.

    Args:
        prompt_lens: Tokens of each prompt.
        num_choices: Of each prompt; beams included.
        longest: Tokens that a sequence can have.
        prompts_shown: How often each prompt is in the answer, as text, token ids or log probabilities.
        held: Whether all of the output is held; a stream writes it as it comes, and at once what it says about prompts.

    Raises:
        RequestError: The message names the fields that multiply.
    """
    if params.truncate_prompt_tokens is not None:
        keep = params.truncate_prompt_tokens if params.truncate_prompt_tokens > 0 else longest
        prompt_lens = [min(length, keep) for length in prompt_lens]
    asked = params.num_reported
    shown = sum(prompt_lens) * prompts_shown * (1 + (params.prompt_logprobs or 0))
    if asked is not None and held:
        most = sum(min(params.max_tokens or longest, max(1, longest - length)) for length in prompt_lens)
        shown += num_choices * most * (1 + asked)
    if shown > MAX_ENTRIES:
        streaming = " Streamed, log probabilities of the output do not count." if asked is not None else ""
        raise RequestError(
            f"The answer might have {shown} entries: prompts × n × (1 + prompt_logprobs), and with logprobs n × "
            f"max_tokens × (1 + logprobs). This server puts at most {MAX_ENTRIES} into one: lower one of these."
            + streaming,
            param="n" if num_choices > 1 else "prompt_logprobs" if params.prompt_logprobs is not None else "logprobs",
        )
