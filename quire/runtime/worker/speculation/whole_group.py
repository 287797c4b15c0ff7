"""The KV group whose blocks hold a sequence from its beginning on."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.spec import ModelSpec


def whole_group(spec: ModelSpec) -> int:
    """The number of the KV group whose blocks hold a sequence from its beginning on.

    Raises:
        ConfigError: There is none, so what proposes drafts cannot keep its keys beside the model's.
    """
    for number, group in enumerate(spec.kv_groups()):
        if group.window is None:
            return number
    raise ConfigError(
        "All layers of this model have a sliding window, so a draft model cannot follow it: use "
        '--speculative-config with "method": "ngram".',
        param="speculative_config",
    )
