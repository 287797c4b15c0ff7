"""Hosted tools that requests name and no server but their maker's can run: they are left out, and said to be.

A model that is not told of a tool answers without it, so leaving one out refuses nothing that the model could do.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.responses import Response

from quire.text.hints import HintLog

DROPPED_TOOLS = "x-quire-dropped-tools"
"""Response header: their types."""
_NAMED = 16
"""Types in the header at most: there are fewer, but for dates."""
_DATE = re.compile(r"_\d{4}_?\d{2}_?\d{2}$", re.ASCII)


def name_dropped(response: Response, tools: Collection[str], hints: HintLog) -> Response:
    """The response, with a header that names the tools that were left out; the log names each once.

    Args:
        tools: Types of hosted tools, from a closed list but for dates.
    """
    kinds = list(dict.fromkeys(tools))
    if kinds:
        response.headers[DROPPED_TOOLS] = ", ".join(kinds[:_NAMED])
    for kind in kinds[:_NAMED]:
        hints.drop(f"The tool {_DATE.sub('', kind)}", "its maker hosts it, and the model is not told of it")
    return response
