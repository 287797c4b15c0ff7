"""Compares a loaded tower with its class's own forward, up to the text model, so that no image is seen wrongly."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.fallback.image_processor import CheckpointProcessor, ImageInputs
from quire.models.fallback.tower import ModuleTower, layer_vectors

_KNOWN = {
    *("attention_mask", "position_ids", "past_key_values", "inputs_embeds", "input_ids", "use_cache", "cache_position"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "labels"),
    *("num_items_in_batch", "is_training", "token_type_ids", "mm_token_type_ids", "rope_deltas"),
}
"""Arguments of text models that say no more than a text's tokens do, or are looked at here."""
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}
"""The largest difference that is rounding, as a share of the largest element."""
_OF_LAYERS = ("deepstack_visual_embeds", "visual_pos_masks", "deepstack_features", "vision_mask")
"""Arguments by which text models get vectors for layers."""
_log = logging.getLogger(__name__)


def check(tower: ModuleTower) -> None:
    """Compute one image, and two.

    Raises:
        CheckpointError: There are more or fewer vectors than tokens, the text model gets more than vectors, or an
            image's vectors depend on another image; the message says what.
    """
    spec = tower.spec
    processor = CheckpointProcessor(Path(spec.directory), spec.image_token)
    values = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    tensors = _tensors(tower, processor.inputs(Image.fromarray(values).resize((100, 75))))
    try:
        inputs = tower.text_inputs(tensors)
        own = tower.vectors(tensors)
    except Exception as error:  # of what classes do with what their processors make
        raise _refused(tower, f"an image cannot be computed ({type(error).__name__}: {error})") from error
    ids = inputs.pop("ids").cpu()
    is_vector = ids[0] == spec.image_token
    if layer_vectors(inputs):
        for name in _OF_LAYERS:
            inputs.pop(name, None)
    more = sorted(name for name, value in inputs.items() if name not in _KNOWN and _says_something(value))
    if more:
        raise _refused(tower, f"its text model gets {', '.join(more)} beside vectors, which is not built")
    given = inputs.get("inputs_embeds")
    if not isinstance(given, Tensor) or given.shape[1] != ids.shape[1]:
        raise _refused(tower, "its text model gets no embeddings")
    _check_mask(tower, _mask_of(tower, inputs, ids), is_vector)
    _check_positions(tower, inputs.get("position_ids"), is_vector, tensors)
    if own.shape != (int(is_vector.sum()), spec.outputs):
        raise _refused(tower, f"its text model gets vectors of shape {list(own.shape)}, not of width {spec.outputs}")
    if not bool((given[0].cpu()[~is_vector] == 0.5).all()) or not bool(own.isfinite().all()):
        raise _refused(tower, "its forward changes the embeddings of a text's tokens")
    _check_two(tower, processor, own)
    _log.info("load check  an image has %d vectors, and its text model gets no more", len(own))


def _check_two(tower: ModuleTower, processor: CheckpointProcessor, reference: Tensor) -> None:
    """Refuse classes that make other vectors of an image when a prompt has another one, of another size."""
    values = np.random.default_rng(1).integers(0, 256, (2, 6, 8, 3), dtype=np.uint8)
    images = [Image.fromarray(each).resize(size) for each, size in zip(values, ((100, 30), (33, 90)), strict=True)]
    both = processor.of_several(images)
    if both is None:
        return
    try:
        own = torch.cat([*tower([_tensors(tower, processor.inputs(each)) for each in images])])
        given = tower.vectors(_tensors(tower, both))
    except Exception as error:  # of processors that cannot read sizes so small, and forwards that take lists
        _log.debug("two images are not compared: %s", error)
        return
    differs = 1.0 if own.shape != given.shape else float((given - own).abs().max() / reference.abs().max())
    if not differs <= 10 * _TOLERANCES[own.dtype]:
        raise _refused(tower, "an image's vectors depend on the other images of a prompt")


def _tensors(tower: ModuleTower, found: ImageInputs) -> dict[str, Tensor]:
    return {name: torch.from_numpy(each).to(tower.device) for name, each in found.tensors.items()}


def _refused(tower: ModuleTower, why: str) -> CheckpointError:
    return CheckpointError(
        f"{tower.spec.architecture} is not served with images: {why}. --language-model-only serves its text model."
    )


def _says_something(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, (dict, list, tuple)) and not value)


def _mask_of(tower: ModuleTower, inputs: Mapping[str, Any], ids: Tensor) -> Any:
    """Return the mask of each kind of layer: that of `generate`, where a forward by itself makes another one."""
    if not tower.spec.in_windows:
        return inputs.get("attention_mask")
    given = inputs["inputs_embeds"]
    return tower.model.create_masks_for_generate(
        config=tower.model.config,
        inputs_embeds=given,
        attention_mask=torch.ones_like(ids, device=given.device),
        past_key_values=None,
        position_ids=torch.arange(given.shape[1], device=given.device)[None],
        mm_token_type_ids=(ids == tower.spec.image_token).int().to(given.device),
    )


def _check_mask(tower: ModuleTower, mask: Any, is_vector: Tensor) -> None:
    """Refuse masks that are not causal, but for the image's tokens where these see one another."""
    causal = torch.zeros(len(is_vector), len(is_vector), dtype=torch.bool)
    behind = (is_vector[:, None] & is_vector).triu(1) if tower.spec.two_sided else causal
    if mask is None and tower.spec.two_sided:
        raise _refused(tower, "tokens of its images do not see those behind them, which was expected")
    for kind, each in mask.items() if isinstance(mask, Mapping) else [("", mask)]:
        expected = causal if tower.spec.in_windows and kind == "full_attention" else behind
        if each is None or each.dim() == 2:
            ahead, is_whole = causal, each is None or bool(each.bool().all())
        else:
            sees = each[0, 0].bool() if each.dtype == torch.bool else each[0, 0] == 0
            ahead, is_whole = sees.triu(1).cpu(), True
        if not is_whole or not torch.equal(ahead, expected):
            raise _refused(tower, "which of its images' tokens see those behind them follows a rule that is not built")


def _check_positions(
    tower: ModuleTower, positions: Tensor | None, is_vector: Tensor, tensors: Mapping[str, Tensor]
) -> None:
    """Refuse positions other than the ones that requests get."""
    count, merge = len(is_vector), tower.spec.merge
    expected = torch.arange(count).expand(3, -1).clone()
    if merge:
        rows, columns = (int(side) // merge for side in tensors["image_grid_thw"][0][1:])
        places = torch.arange(rows * columns)
        start = int(is_vector.nonzero()[0])
        own = torch.stack((torch.zeros_like(places), places // columns, places % columns)) + start
        behind = torch.arange(count - start - len(places)) + start + max(rows, columns)
        if int(is_vector.sum()) != len(places):
            raise _refused(tower, f"{len(places)} squares of its image have {int(is_vector.sum())} tokens")
        expected = torch.cat((expected[:, :start], own, behind.expand(3, -1)), 1)
    if positions is None:
        equal = not merge
    else:
        given = positions.reshape(-1, count) if positions.shape[-1] == count else positions
        given = given[-3:] if len(given) > 3 else given.expand(3, -1)
        equal = given.shape == expected.shape and torch.equal(given.long(), expected)
    if not equal:
        raise _refused(tower, "the positions of its images follow a rule that is not built")
