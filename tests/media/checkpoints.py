"""Tiny checkpoints of models that see images, with the files that published ones have, and pictures for them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.checkpoints import TINY, VOCAB_SIZE, write_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<image>"
IMAGE_TOKEN = VOCAB_SIZE
SIDE, PATCH = 42, 14
TOKENS = (SIDE // PATCH) ** 2
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<image>\\n' }}{% else %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As LLaVA's own, but that images stay where they were written."""


def make_llava(directory: Path, *, seed: int = 0, text: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """Write a LLaVA with random weights, its tokenizer, chat template and image processor. `text` and `config` are what
    differs in its text model and in the whole."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    directory.mkdir(parents=True, exist_ok=True)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    tiny = TINY | {"vocab_size": VOCAB_SIZE + 8, "eos_token_id": None} | (text or {})
    sizes: dict[str, Any] = {
        "vision_config": vision, "text_config": LlamaConfig(**tiny), "image_token_id": IMAGE_TOKEN, **config,
    }  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(**sizes))
    write_model(model, directory, seed, (IMAGE,), TEMPLATE)
    (directory / "preprocessor_config.json").write_text(json.dumps(clip_settings()))
    return directory


TILE = ("<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>")
"""Special tokens that stand around an image's tiles, behind its own token."""


def make_idefics(directory: Path, *, seed: int = 0) -> Path:
    """Write an Idefics3 as `make_llava` does: its images are tiles with tokens around each of them."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    directory.mkdir(parents=True, exist_ok=True)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = LlamaConfig(**(TINY | {"vocab_size": VOCAB_SIZE + 8, "eos_token_id": None, "pad_token_id": 0}))
    config = Idefics3Config(
        vision_config=vision | {"image_size": 32, "patch_size": 8}, text_config=text, image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    )  # fmt: skip
    write_model(Idefics3ForConditionalGeneration(config), directory, seed, (IMAGE, *TILE), TEMPLATE)
    images = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64}}
    images |= {"max_image_size": {"longest_edge": 32}}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    surrounds = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (directory / "processor_config.json").write_text(json.dumps(surrounds))
    return directory


GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
"""Special tokens: of a vector, and those around an image, of which prompts have the first."""


def make_gemma(directory: Path, *, seed: int = 0) -> Path:
    """Write a Gemma 3 as `make_llava` does: the 4 tokens of an image see one another, in windows of 8 as well."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    directory.mkdir(parents=True, exist_ok=True)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = TINY | {
        "vocab_size": VOCAB_SIZE + 8, "eos_token_id": None, "pad_token_id": 0, "head_dim": 16, "sliding_window": 8,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = Gemma3Config(
        vision_config=vision | {"image_size": 32, "patch_size": 8}, text_config=text, mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN, boi_token_index=IMAGE_TOKEN + 1, eoi_token_index=IMAGE_TOKEN + 2,
        tie_word_embeddings=False,  # else answers repeat a token, whatever sees what
    )  # fmt: skip
    write_model(Gemma3ForConditionalGeneration(config), directory, seed, GEMMA, TEMPLATE)
    named = dict(zip(("image_token", "boi_token", "eoi_token"), GEMMA, strict=True))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": named}))
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    (directory / "preprocessor_config.json").write_text(json.dumps(images | {"image_seq_length": 4}))
    surrounds = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (directory / "processor_config.json").write_text(json.dumps(surrounds))
    return directory


def write_model(model: Any, directory: Path, seed: int, special_tokens: Sequence[str], template: str) -> None:
    """Write a model with random weights, a tokenizer whose special tokens follow its vocabulary, and a template."""
    import torch
    from tokenizers import Tokenizer

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = bool((parameter == 1.0).all())
            parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special_tokens))
    assert [tokenizer.token_to_id(each) for each in special_tokens] == list(
        range(VOCAB_SIZE, VOCAB_SIZE + len(special_tokens))
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)


def clip_settings(side: int = SIDE) -> dict[str, Any]:
    """What preprocessor_config.json has for a tower of this size."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "resample": 3,
    }


def picture(width: int = 60, height: int = 44, seed: int = 0) -> Image:
    """A picture of random colours that change slowly, so that it does not vanish when it is resized."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BILINEAR)


def file_of(image: Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens, whose ids follow those of the vocabulary."""
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_PROCESSOR: dict[str, Any] = {"min_pixels": 4 * 8 * 8, "max_pixels": 30 * 8 * 8, "patch_size": 4, "merge_size": 2}


def make_qwen(directory: Path, generation: str, *, seed: int = 0) -> Path:
    """Write a Qwen2-VL ("2"), Qwen2.5-VL ("2_5") or Qwen3-VL ("3") with random weights, its tokenizer, chat template
    and processor."""
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4}
    if generation == "2":
        vision |= {"embed_dim": 16, "mlp_ratio": 2, "hidden_size": TINY["hidden_size"]}
    else:
        vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": TINY["hidden_size"]}
    if generation == "2_5":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
    if generation == "3":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
        rope |= {"mrope_interleaved": True, "mrope_section": [3, 2, 1]}
    text = TINY | {"vocab_size": VOCAB_SIZE + 8, "eos_token_id": None, "head_dim": 12, "rope_parameters": rope}
    ids = dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
                   range(VOCAB_SIZE, VOCAB_SIZE + 4), strict=True))  # fmt: skip
    config_class = getattr(transformers, f"Qwen{generation}VLConfig".replace("2_5VL", "2_5_VL"))
    config = config_class(vision_config=vision, text_config=text, **ids)
    model = getattr(transformers, f"Qwen{generation}VLForConditionalGeneration".replace("2_5VL", "2_5_VL"))(config)
    write_model(model, directory, seed, QWEN_TOKENS, QWEN_TEMPLATE)
    (directory / "preprocessor_config.json").write_text(json.dumps(QWEN_PROCESSOR))
    if generation == "3":
        size = {"shortest_edge": 4 * 8 * 8, "longest_edge": 40 * 8 * 8}
        videos = {"size": size, "patch_size": 4, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return directory


def edit_to_flat(directory: Path) -> None:
    """Write config.json as transformers 4 wrote it for Qwen-VL: without a `text_config`."""
    from tests.checkpoints import edit_config

    def edit(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = dict(text.pop("rope_parameters"))
        config.update({name: value for name, value in text.items() if name not in ("model_type", "layer_types")})
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}

    edit_config(directory, edit)
