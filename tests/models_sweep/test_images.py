"""Every class of transformers that reads images, by its own tower and processor, against `generate`.

What cannot be served must be refused by an error of Quire's; `--write-images PAGE` writes what was found to a page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quire import LLM, SamplingParams
from quire.errors import SetupError
from quire.foundation.config import ModelConfig, environment
from quire.models.fallback.image_processor import CheckpointProcessor, PixtralLayout
from quire.models.spec import read_spec, spec_of
from tests.media.checkpoints import picture
from tests.models_sweep.image_rows import ROWS, write_images_model

NEW_TOKENS = 16
TOLERANCE = 1e-3
"""Of log probabilities: what an image changes in one is far more."""
SIZES: tuple[tuple[tuple[int, int], ...], ...] = ((), ((60, 44),), ((100, 30), (33, 90)))
"""Of the images of each prompt."""
Note = Callable[[str, object], None]
pytestmark = pytest.mark.models


def generated(
    model: Any, processor: Any, text: str, images: Sequence[Any], vectors: int, cache: str | None = None
) -> tuple[list[int], list[int], list[float]]:
    """What transformers makes of a prompt: its tokens, and those that `generate` adds with this kind of cache, with
    their log probabilities."""
    if isinstance(processor, PixtralLayout):
        inputs = _of_pixtral(processor, text, images)
    else:
        given = {"add_special_tokens": False, "return_tensors": "pt"}
        make = processor if images else processor.tokenizer  # some processors refuse prompts without images
        inputs = dict(make(text=[text], **given | ({"images": list(images)} if images else {})))
    ids = inputs["input_ids"] = torch.as_tensor(inputs["input_ids"])
    inputs["attention_mask"] = torch.ones_like(ids)
    if images:
        inputs["mm_token_type_ids"] = inputs["token_type_ids"] = (ids == vectors).int()
    accepted = (
        inspect.signature(model.forward).parameters.keys()
        | inspect.signature(model.base_model.forward).parameters.keys()
    )
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        accepted = accepted - {"token_type_ids"}
    inputs = {name: value for name, value in inputs.items() if name in accepted}
    inputs = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        found = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True,
            return_dict_in_generate=True, output_logits=True, cache_implementation=cache,
        )  # fmt: skip
    tokens = found.sequences[0, ids.shape[1] :].tolist()
    logprobs = [float(each[0].float().log_softmax(-1)[token]) for each, token in zip(found.logits, tokens, strict=True)]
    return ids[0].tolist(), tokens, logprobs


def _of_pixtral(layout: PixtralLayout, text: str, images: Sequence[Any]) -> dict[str, Any]:
    """What Pixtral's processor, which needs torchvision, makes of a prompt."""
    if not images:
        return dict(layout.tokenizer([text], return_tensors="pt"))
    found = dict(layout.images(images=list(images), patch_size=layout.side, return_tensors="pt"))
    for height, width in found["image_sizes"].tolist():
        rows = ["[IMG_SOME]" * (width // layout.side)] * (height // layout.side)
        text = text.replace("[IMG]", "[IMG_BREAK]".join(rows) + "[IMG_END]", 1)
    return found | dict(layout.tokenizer([text.replace("[IMG_SOME]", "[IMG]")], return_tensors="pt"))


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
def test_images(
    model_type: str, tmp_path: Path, record_property: Note, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")
    torch.set_num_threads(1)
    named, directory = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type], tmp_path / "model"
    architecture = named if isinstance(named, str) else named[0]
    record_property("images_model", (model_type, architecture))
    try:
        model = write_images_model(directory, architecture, model_type)
    except Exception as error:  # of transformers, whose checks of configs are of many kinds
        record_property("outcome", ("not built", _line(error)))
        pytest.skip(f"no tiny model: {_line(error)}")
    try:
        vision = spec_of(ModelConfig(str(directory))).vision
    except SetupError as error:
        record_property("outcome", ("refused", _line(error)))
        return
    if vision is None:
        why = "; ".join(caplog.messages).partition("text model is: ")[2]
        record_property("outcome", ("refused", why.splitlines()[0] if why else "config.json has no vision_config"))
        return
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 16, "max_num_seqs": 4}
    settings["max_num_batched_tokens"] = max(16, getattr(vision, "longest", 0))
    settings |= {"max_model_len": 1400, "kv_cache_memory_bytes": 64 << 20, "block_size": 8}
    try:
        llm = LLM(str(directory), **settings)
    except SetupError as error:
        record_property("outcome", ("refused", _line(error)))
        return
    processor = CheckpointProcessor(directory, vision.image_token)
    row = ROWS.get(model_type, {})
    before, behind = row.get("around", ("", ""))
    mark = llm.get_tokenizer().decode([vision.placeholder], skip_special_tokens=False)
    mark = f"{before}{mark}{behind}"
    texts = ("Hello world", f"one {mark} two", f"{mark} three {mark} four")
    prompts, expected = [], []
    for text, sizes in zip(texts, SIZES, strict=True):
        images = [picture(*size, seed) for seed, size in enumerate(sizes)]
        expected.append(generated(model, processor.processor, text, images, vision.image_token, row.get("cache")))
        prompts.append({"prompt": text, "multi_modal_data": {"image": images}})
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    again = llm.generate(prompts, sampling, use_tqdm=False)
    llm.close()
    assert [list(each.prompt_token_ids or ()) for each in outputs] == [ids for ids, _, _ in expected]
    assert [list(each.outputs[0].token_ids) for each in outputs] == [found for _, found, _ in expected]
    for each, (_, found, logprobs) in zip(outputs, expected, strict=True):  # tiny models may repeat one token
        own = [by_token[token].logprob for by_token, token in zip(each.outputs[0].logprobs or (), found, strict=True)]
        assert own == pytest.approx(logprobs, abs=TOLERANCE)
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in outputs]
    is_fallback = read_spec(directory).fallback is not None
    record_property("outcome", ("right", "text by transformers' modules" if is_fallback else "text by Quire's layers"))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return re.sub(r"/\S*/model\b", "model", f"{type(error).__name__}: {lines[0] if lines else ''}")
