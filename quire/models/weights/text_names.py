"""The text model's part of a checkpoint that has more: what its tensors are called, and what is left out.

Models that also read images or sounds wrap a text model, and each generation of transformers has other prefixes for
its names. Imports no torch.
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_HEAD = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(lm_head(?:\..+)?)$")
_OTHERS = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower|multi_modal_projector|multimodal_projector|mm_projector"
    r"|connector|image_newline)(?:\.|$)"
)


def text_name(name: str) -> str | None:
    """What the text model alone calls a tensor; None: it is of a part that reads something else."""
    if found := _HEAD.match(name):
        return found[1]
    if found := _TEXT.match(name):
        return f"model.{name[found.end() :]}"
    return None if _OTHERS.match(name) else name
