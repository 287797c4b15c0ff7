"""A server whose model says what the test has put into its mouth, over the real engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.api.server import Server, running
from tests.checkpoints import write_tokenizer

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "Answer with <tool_call></tool_call>.{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""In the manner of Qwen3's."""


class Speaker:
    """What the model says, to any prompt.

    Attributes:
        text: Its next answers; then it ends its turn.
    """

    def __init__(self) -> None:
        self.text = ""
        self.tokenizer: Tokenizer | None = None

    def sample(self, history: Sequence[int], drawn: int, vocab_size: int) -> int:
        """The next token, see FakeExecutor."""
        assert self.tokenizer is not None
        tokens = self.tokenizer.encode(self.text, add_special_tokens=False)
        eos = self.tokenizer.eos_id
        assert eos is not None
        return tokens[drawn] if drawn < len(tokens) else eos


@contextlib.contextmanager
def speaking(
    directory: Path, template: str = TEMPLATE, *, special_tokens: Sequence[str] = (), **options: Any
) -> Iterator[tuple[Server, Speaker]]:
    """A server and what its model says.

    Args:
        special_tokens: Further ones, in place of the tokenizer's last tokens.
    """
    write_tokenizer(directory)
    make_special(directory / "tokenizer.json", special_tokens)
    (directory / "chat_template.jinja").write_text(template)
    speaker = Speaker()
    speaker.tokenizer = load_tokenizer(directory)
    with running(directory, sample=speaker.sample, **options) as server:
        yield server, speaker


def make_special(file: Path, tokens: Sequence[str]) -> None:
    """Make these texts special tokens of a tokenizer.json, in place of its last tokens."""
    core = json.loads(file.read_text())
    vocabulary, merges = core["model"]["vocab"], core["model"]["merges"]
    for token in tokens:
        last = max(vocabulary, key=vocabulary.__getitem__)
        merges.pop()
        core["added_tokens"].append({
            "id": vocabulary.pop(last), "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        })  # fmt: skip
    for entry in core["added_tokens"]:
        vocabulary.setdefault(entry["content"], entry["id"])
    file.write_text(json.dumps(core))
