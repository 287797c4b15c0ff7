"""What clients call the fields of a request that another API's schema stands for.

Owns renaming them in errors. Which name becomes which is known to the schemas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from quire.errors import RequestError

_FIRST = re.compile(r"[^.\[]*")


@contextmanager
def fields_named(sent: Mapping[str, str] | Callable[[str], str]) -> Iterator[None]:
    """A RequestError about a field names it as the client sent it; its class, code and text stay.

    Args:
        sent: The client's names by those that errors have, where they differ; an entry for `tools` is also one for
            `tools[0].name`. Or what makes one from the other.
    """
    try:
        yield
    except RequestError as error:
        name = error.param or ""
        error.rename(sent(name) if callable(sent) else _sent_name(name, sent))
        raise


def _sent_name(name: str, sent: Mapping[str, str]) -> str:
    if name in sent:
        return sent[name]
    match = _FIRST.match(name)
    assert match is not None
    first = match[0]
    return sent.get(first, first) + name[len(first) :]
