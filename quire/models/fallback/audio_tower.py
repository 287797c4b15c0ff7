"""A tower for sounds that transformers' own modules compute: what a class's forward puts in place of audio tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.fallback.audio_processor import CheckpointAudioProcessor
from quire.models.fallback.classes import arguments_of
from quire.models.fallback.tower import TextStub, build_tower_model
from quire.models.fallback.weights import TransformersWeights
from quire.models.layers.factory import LayerFactory

_KNOWN = {"inputs_embeds", "attention_mask", "position_ids", "use_cache", "return_dict"}
"""Arguments of text models that say no more than a text's tokens do, or are looked at here."""
_BEFORE, _BEHIND = 3, 2
"""Tokens of text around the sound of the check."""


class HearingTower:
    """Sounds to the vectors that stand in place of their tokens. The class's own forward is run as far as its text
    model, which gets them.

    Args:
        spec: The tower.
        build: Remembers the weights as one layer.
    """

    def __init__(self, spec: HearingSpec, build: LayerFactory) -> None:
        self.spec = spec
        self._dtype = build.options.dtype
        self._model: Any = build_tower_model(Path(spec.directory), spec.architecture, self._dtype, images=False)
        self._accepted = arguments_of(self._model) | arguments_of(self._model.base_model)
        build.remember(TransformersWeights(self._model, self, build.options, [], leaves_out=True, is_part=True))

    def fuse_attentions(self, dtype: torch.dtype) -> None:
        """Do nothing: a tower's attention is transformers' own."""

    def __call__(self, sounds: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Compute vectors: the tensors of each sound, its tokens among them → [vectors, outputs] each."""
        return [self._vectors(sound) for sound in sounds]

    def _vectors(self, sound: Mapping[str, Tensor]) -> Tensor:
        vectors: Tensor = self.text_inputs(sound)["inputs_embeds"][0][sound["input_ids"][0] == self.spec.audio_token]
        return vectors.to(self._dtype)

    def text_inputs(self, sound: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the class's forward calls its text model with. Raises CheckpointError if it does not."""
        inputs = {
            name: each.to(self._dtype) if each.is_floating_point() else each
            for name, each in sound.items()
            if name in self._accepted
        }
        try:
            with torch.inference_mode():
                self._model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
        except TextStub.Called as called:
            return dict(called.inputs)
        raise CheckpointError("its own forward does not call its text model")


def check(tower: HearingTower) -> None:
    """Compute one sound among tokens of text.

    Raises:
        CheckpointError: The text model would get more than vectors in place of the sound's tokens; the message says
            what.
    """
    spec = tower.spec
    samples = np.random.default_rng(0).normal(0, 0.1, spec.rate).astype(np.float32)
    found = CheckpointAudioProcessor(Path(spec.directory), spec.audio_token).inputs(samples)
    tensors = {name: torch.from_numpy(each) for name, each in found.tensors.items()}
    ids = torch.tensor([[1] * _BEFORE + found.tokens + [2] * _BEHIND])
    try:
        inputs = tower.text_inputs({**tensors, "input_ids": ids})
        (own,) = tower([tensors])
    except Exception as error:  # of what classes do with what their processors make
        raise _refused(spec, f"a sound cannot be computed ({type(error).__name__}: {error})") from error
    more = sorted(name for name, value in inputs.items() if name not in _KNOWN and _says_something(value))
    if more:
        raise _refused(spec, f"its text model gets {', '.join(more)} beside vectors, which is not built")
    given, mask, positions = (inputs.get(name) for name in ("inputs_embeds", "attention_mask", "position_ids"))
    is_vector = ids[0] == spec.audio_token
    if not isinstance(given, Tensor) or given.shape[1:] != (ids.shape[1], spec.outputs):
        raise _refused(spec, "its text model gets no embeddings of its width")
    if not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.bool().all())):
        raise _refused(spec, "its text model gets a mask of its own, which is not built")
    if positions is not None and not torch.equal(positions.flatten(), torch.arange(ids.shape[1])):
        raise _refused(spec, "the positions of its sounds follow a rule that is not built")
    if not bool((given[0][~is_vector] == 0.5).all()) or not torch.equal(given[0][is_vector].to(own.dtype), own):
        raise _refused(spec, "a sound's vectors depend on the text around it, which is not built")


def _refused(spec: HearingSpec, why: str) -> CheckpointError:
    return CheckpointError(
        f"{spec.architecture} is not served with sounds: {why}. --language-model-only serves its text model."
    )


def _says_something(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, (dict, list, tuple)) and not value)
