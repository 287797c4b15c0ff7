"""What the start decides about images: whether they are read, and what the tower takes of the memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add, MediaSpan, Medium
from quire.media.model_images import load_model_images
from quire.models.rank_spec import check_pipeline_parallel_size, rank_share
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.vision_spec import ClipSpec, read_vision
from quire.models.weights.safetensors_files import read_headers
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.planning.footprint import GIB
from quire.planning.images import tower_bytes
from quire.planning.machine import Gpu, Machine
from quire.planning.memory_budget import weight_bytes
from quire.sampling_params import SamplingParams
from quire.serving.api.session.open_requests import OpenSequence, replay_adds
from quire.serving.api.session.output_collector import OutputCollector
from tests.media.checkpoints import edit_to_flat, make_llava, make_qwen


@pytest.fixture(scope="module", params=["llava", "2", "2_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    return make_llava(directory) if request.param == "llava" else make_qwen(directory, request.param)


def started(model: Path, **settings: Any) -> ResolvedConfig:
    return resolve(Config().with_values(model=str(model), device="cpu", **settings))


def test_the_weights_of_the_tower_are_counted(model: Path) -> None:
    vision = read_vision(model)
    assert vision is not None
    last = f".layers.{vision.layers}." if isinstance(vision, ClipSpec) else "none"
    stored = {
        name: math.prod(shape)
        for name, shape in read_headers(model).items()
        if any(part in name for part in ("vision_tower", "projector", "visual"))
        and last not in name
        and "post_layernorm" not in name
    }
    assert vision.num_parameters == sum(stored.values())
    found = started(model)
    without = started(model, language_model_only=True)
    more = weight_bytes(found.config, found.spec) - weight_bytes(without.config, without.spec)
    assert more > 4 * vision.num_parameters


@pytest.mark.parametrize("settings", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}])
def test_text_alone_is_served_where_images_are_not_wanted(model: Path, settings: dict[str, Any]) -> None:
    found = started(model, **settings)
    assert found.spec.vision is None
    assert load_model_images(found.config) is None
    assert not any(line.startswith("images") and "tokens" in line for line in found.reasons)
    images = started(model, limit_mm_per_prompt={"image": 2}, max_num_batched_tokens=4096)
    (line,) = (line for line in images.reasons if line.startswith("images"))
    assert "tokens each; the tower takes" in line
    assert "for vectors of 4,096 tokens" in line
    assert started(model, limit_mm_per_prompt={"image": {"count": 2, "width": 512}}).config.media.most_of("image") == 2
    served = load_model_images(images.config)
    assert served is not None
    assert served.limit == 2


def test_the_first_stage_of_a_pipeline_has_the_tower_and_every_rank_of_a_stage(model: Path) -> None:
    found = started(model, tensor_parallel_size=2, pipeline_parallel_size=2)
    shares = [rank_share(found.spec, Mesh(rank, tp=2, pp=2)) for rank in range(4)]
    of_tower = [tower_bytes(found.config, share) for share in shares]
    assert of_tower == [tower_bytes(found.config, found.spec)] * 2 + [0, 0]
    gpus = Machine(64 * GIB, fast_bfloat16=True, gpu=Gpu("two", (9, 0), 80 * GIB, 79 * GIB, of=2), why_no_gpu="")
    assert resolve(Config().with_values(model=str(model), tensor_parallel_size=2), gpus).spec.vision is None


def test_images_that_are_added_to_layers_need_these_in_the_first_stage(model: Path) -> None:
    spec = started(model).spec
    deep = ModuleVisionSpec(str(model), "", 1, 1, 48, 1, 1, 1, 1, deep=(1, 2))
    seeing = replace(spec, vision=deep, layers=spec.layers * 2)
    check_pipeline_parallel_size(seeing, 2)
    check_pipeline_parallel_size(spec, 2)
    with pytest.raises(ConfigError, match="the first stage would have 1 layers, and images are added to"):
        check_pipeline_parallel_size(seeing, 4)


def test_settings_of_the_processor_are_checked_at_the_start(model: Path) -> None:
    for settings, message in (
        ({"limit_mm_per_prompt": {"image": {"count": -1}}}, "at least 0 for image"),
        ({"limit_mm_per_prompt": {"image": {"width": 4}}}, "at least 0 for image"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": "white"}}}, "three numbers"),
        ({"mm_processor_cache_gb": -1.0}, "at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            started(model, **settings)
    for wrong in ({"colour": 1}, {"resample": 9}):
        with pytest.raises(ConfigError, match=r"--mm-processor-kwargs"):
            load_model_images(started(model, mm_processor_kwargs=wrong).config)


def test_a_prompt_that_goes_to_another_engine_takes_its_images_along() -> None:
    medium = Medium(b"digest", 1, 1, 2, b"rgb")
    params = SamplingParams(max_tokens=9)
    add = Add(1, [5, 5, 6], 3, params, [], 0, 0.0, media=[MediaSpan(0, medium)])
    sequence = OpenSequence(add, OutputCollector([add], []), 0)
    sequence.generated.extend([7, 8])
    (again,) = replay_adds([sequence])
    assert again.tokens == [5, 5, 6, 7, 8]
    assert again.media == add.media


def test_older_files_that_have_no_text_config_are_read(tmp_path: Path) -> None:
    directory = make_qwen(tmp_path / "model", "2_5")
    spec = started(directory).spec
    edit_to_flat(directory)
    assert started(directory).spec == spec
