"""Tiny checkpoints of every class of transformers that reads images, with a tokenizer and its own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.models_sweep.fallback_rows import tiny_config

_SPECIAL = (
    "<image> <|image|> <|video|> <|image_pad|> <|video_pad|> <video> <|patch|> <|image_start|> <|image_end|> "
    "<fake_token_around_image> <end_of_utterance> <|vision_start|> <|vision_end|> <|audio|> <im_patch> "
    "<im_start> <im_end> <im_col> <global-img> <|tile_y_separator|> <|tile_x_separator|> <|end_of_image|> "
    "<|begin_of_image|> <|begin_of_video|> <|end_of_video|> [IMG] [IMG_BREAK] [IMG_END] <|START_OF_IMG|> "
    "<|END_OF_IMG|> <|IMG_PATCH|> <|IMG_LINE_BREAK|> <img> </img> <IMG_CONTEXT> <start_of_image> <end_of_image> "
    "<image_soft_token> <|media_pad|> <patch_newline> <patch_start> <patch_end> <imgpad> <low_res_im_start> "
    "<image_pad> <|img_thumbnail|> <|IMAGE_PLACEHOLDER|> <|IMAGE_START|> <|IMAGE_END|> <fim_prefix> <IMG_ATOM> "
    "<slice> </slice> <image_id> </image_id> </image> <|content_image|> <|imgpad|> <so_start> <row> "
    "<racm3:break> <eoss> <|image_break|> <|image_boundary|> <|image_wrapper|> <|grid_eos|> <|grid_bos|> "
    "<document> <unk> <audio> <|IMAGE_PAD|> <|AUDIO|> <|VISION_START|> <|VISION_END|> <|VIDEO_PAD|> "
    "<audio_soft_token> <reserved08706> <|vision_bos|> <|vision_eos|> <|AUDIO_eos|> <|audio_bos|> <row_1_col_1> "
    "<row_1_col_2> <row_2_col_1> <row_2_col_2> <loc0000> <boi> <eoi>"
)
SPECIAL = _SPECIAL.split()
"""Special tokens of processors, whose ids follow those of the vocabulary."""
IDS = {text: VOCAB_SIZE + place for place, text in enumerate(SPECIAL)}
ROOM = VOCAB_SIZE + len(SPECIAL) + 8
NAMED = {
    "image_token": "<image>", "video_token": "<video>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "audio_token": "<audio>", "image_end_token": "<|image_end|>", "image_start_token": "<|image_start|>",
    "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>", "slice_start_token": "<slice>",
    "slice_end_token": "</slice>", "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>", "start_image_token": "<img>",
    "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "document_token": "<document>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|AUDIO_eos|>", "boa_token": "<|audio_bos|>",
    "row_token": "<row>", "image_break_token": "<|image_break|>", "image_wrapper_token": "<|image_wrapper|>",
    "image_boundary_token": "<|image_boundary|>", "grid_eos_token": "<|grid_eos|>", "grid_bos_token": "<|grid_bos|>",
    "video_start_token": "<|begin_of_video|>", "video_end_token": "<|end_of_video|>", "unk_token": "<unk>",
}  # fmt: skip
"""Special tokens by the names under which tokenizers have them."""
TEXT: dict[str, Any] = {"vocab_size": ROOM, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": 0}
_QWEN = {"shortest_edge": 16 * 256, "longest_edge": 40 * 256}
_GRID = {
    "images": {"size": _QWEN, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2},
    "vision": {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
               "hidden_size": 64, "num_heads": 4},
    "token": "<image>",
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_HALF = {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
_TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2],
                              "mrope_interleaved": True}}  # fmt: skip
_DEEP = _GRID | {"text": _TURNS, "vision": _GRID["vision"] | {"deepstack_visual_indexes": [0, 1]}}
_GATED = {"head_dim": 32, "rope_parameters": _TURNS["rope_parameters"] | {"mrope_section": [2, 1, 1],
                                                                          "partial_rotary_factor": 0.25},
          "layer_types": ["linear_attention", "full_attention"] * 2}  # fmt: skip
_CLIP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_SQUARE = {"size": {"height": 32, "width": 32}}
_CLIP_VISION = {"image_size": 32, "patch_size": 8}
_LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_MINICPM = {"images": {"scale_resolution": 64, "patch_size": 8}, "vision": {"patch_size": 8, "image_size": 64},
            "text": _GATED}  # fmt: skip
_PIXTRAL = {"images": {"size": {"longest_edge": 64}, "patch_size": 8}, "token": "[IMG]",
            "vision": {"patch_size": 8, "image_size": 64},
            "processor": {"patch_size": 8, "spatial_merge_size": 2}, "config": {"spatial_merge_size": 2}}  # fmt: skip
_PINS = [[32, 64], [64, 32], [64, 64]]

ROWS: dict[str, dict[str, Any]] = {
    "aria": {"images": {"max_image_size": 490}, "processor": {"size_conversion": {"32": 8}}},
    "aya_vision": {"images": _SQUARE | {"crop_to_patches": True, "max_patches": 4}, "vision": _CLIP_VISION,
                   "processor": {"patch_size": 8, "img_size": 32, "downsample_factor": 2},
                   "token": "<|IMG_PATCH|>", "config": {"downsample_factor": 2}},
    "exaone4_5": _GRID | {"tokens": {"image_token": "<image>"}},
    "gemma3": {"images": _SQUARE | {"image_seq_length": 4}, "vision": _CLIP_VISION,
               "config": {"mm_tokens_per_image": 4}, "processor": {"image_seq_length": 4},
               "tokens": {"image_token": "<image_soft_token>"}, "token": "<image_soft_token>"},
    "glm4v": _GRID | {"text": _MROPE}, "glm46v": _GRID | {"text": _MROPE},
    "glm4v_moe": _GRID | {"text": _HALF, "like": "glm4v"}, "glm_ocr": _GRID | {"text": _MROPE, "like": "glm46v"},
    "got_ocr2": {"images": _SQUARE, "token": "<imgpad>"},
    "hunyuan_vl": _GRID, "hyperclovax_vision_v2": _GRID, "lfm3_vl": _GRID,
    "idefics2": {"images": {"size": {"shortest_edge": 24, "longest_edge": 32}, "do_image_splitting": False},
                 "vision": _CLIP_VISION},
    "idefics3": {"images": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
                 "vision": _CLIP_VISION, "processor": {"image_seq_len": 4}, "config": {"scale_factor": 2}},
    "internvl": {"images": _SQUARE | {"crop_to_patches": True, "max_patches": 4}, "processor": {"image_seq_length": 4},
                 "vision": {"image_size": [32, 32], "patch_size": [8, 8]}, "token": "<IMG_CONTEXT>",
                 "config": {"downsample_ratio": 0.5}},
    "lighton_ocr": {"images": {"size": {"longest_edge": 64}, "patch_size": 8},
                    "vision": {"patch_size": 8, "image_size": 64},
                    "processor": {"patch_size": 8, "spatial_merge_size": 2}, "config": {"spatial_merge_size": 2}},
    "llava": {"images": _CLIP, "vision": _CLIP_VISION, "processor": _LLAVA},
    "llava_next": {"images": _CLIP | {"image_grid_pinpoints": _PINS}, "vision": _CLIP_VISION, "processor": _LLAVA,
                   "config": {"image_grid_pinpoints": _PINS}},
    "llava_next_video": {"images": _CLIP | {"image_grid_pinpoints": _PINS}, "vision": _CLIP_VISION,
                         "processor": _LLAVA, "config": {"image_grid_pinpoints": _PINS}},
    "llava_onevision": {"images": _SQUARE | {"image_grid_pinpoints": _PINS}, "vision": _CLIP_VISION,
                        "processor": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
                        "config": {"image_grid_pinpoints": _PINS}},
    "cosmos3_edge": _GRID | {"text": _MROPE},
    "granite_docling": {"images": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
                        "vision": _CLIP_VISION | {"out_hidden_size": 64}, "processor": {"image_seq_len": 4}},
    "minicpmv4_6": _MINICPM, "minicpmv4_7": _MINICPM | {"like": "minicpmv4_6"},
    "mistral_large4": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "ovis2": {"images": _SQUARE, "vision": _CLIP_VISION, "processor": {"image_seq_length": 16}, "token": "<IMG_ATOM>"},
    "paddleocr_vl": _GRID | {"text": _MROPE, "images": _GRID["images"] | {"temporal_patch_size": 1}},
    "paligemma": {"images": _SQUARE | {"image_seq_length": 16}, "vision": _CLIP_VISION},
    "qianfan_ocr": {"images": _SQUARE | {"crop_to_patches": True, "max_patches": 4},
                    "processor": {"image_seq_length": 4}, "token": "<IMG_CONTEXT>",
                    "vision": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "qwen2_vl": _GRID | {"vision": {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8, "depth": 2},
                         "text": _MROPE},
    "qwen2_5_vl": _GRID | {"text": _MROPE}, "qwen3_vl": _DEEP, "qwen3_5": _GRID | {"text": _GATED},
    "qwen3_5_moe": _GRID | {"text": _GATED}, "qwen3_vl_moe": _DEEP | {"like": "qwen3_vl"},
    "video_llama_3": _GRID, "cosmos3_omni": _DEEP | {"like": "qwen3_vl"},
    "smolvlm": {"images": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
                "vision": _CLIP_VISION, "processor": {"image_seq_len": 4}, "config": {"scale_factor": 2}},
    "video_llava": {"images": _CLIP, "vision": _CLIP_VISION, "processor": _LLAVA},
    "vipllava": {"images": _CLIP, "vision": _CLIP_VISION, "processor": _LLAVA,
                 "config": {"vision_feature_layers": [-2, -3]}},
}  # fmt: skip
"""By model type: `config` for the whole, `vision` and `text` for its parts, `images` for the image processor,
`processor` for what surrounds it, `tokens` for the tokenizer, `token` for the one of vectors, and `like` for a model
type whose processors are its own."""


def image_config(model_type: str, token: str) -> PreTrainedConfig:
    """Make a tiny config with tokens of the tokenizer."""
    kind, row = CONFIG_MAPPING[model_type], ROWS.get(model_type, {})
    values = tiny_config(kind, model_type).to_dict()
    for part, usual in (("vision", {}), ("text", TEXT)):
        inner = values.get(f"{part}_config")
        if isinstance(inner, dict):
            inner |= {name: value for name, value in usual.items() if name in inner} | row.get(part, {})
    for name in ("image_token_id", "image_token_index", "img_context_token_id", "image_patch_id"):
        if name in values:
            values[name] = IDS[token]
    for name, text in (
        ("video_token_id", "<video>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
        ("boi_token_id", "<start_of_image>"),
        ("eoi_token_id", "<end_of_image>"),
        ("image_start_token_id", "<|begin_of_image|>"),
        ("image_end_token_id", "<|end_of_image|>"),
    ):
        if name in values:
            values[name] = IDS[text]
    for name in ("vocab_size",):
        if name in values:
            values[name] = ROOM
    return kind(**values | row.get("config", {}))


def write_processor(directory: Path, model_type: str) -> Any:
    """Write a tokenizer and the files of a processor, of small images."""
    row = ROWS.get(model_type, {})
    write_tokenizer(directory)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    named = NAMED | row.get("tokens", {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": named}))
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(row.get("like", model_type)) or {}
    name = names.get("pil") or names.get("torchvision") or row.get("image_processor")
    images = {"image_processor_type": name.removesuffix("Pil") if name else None, **row.get("images", {})}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    kind = row.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(row.get("like", model_type))
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": kind, **row.get("processor", {})}))


def write_images_model(directory: Path, architecture: str, model_type: str, most: float = 5e7) -> Any:
    """Write a tiny checkpoint with random weights. Raises whatever transformers raises for what it cannot build."""
    directory.mkdir(parents=True, exist_ok=True)
    token = ROWS.get(model_type, {}).get("token", "<image>")
    config, kind = image_config(model_type, token), getattr(transformers, architecture)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > most:
        raise ValueError(f"{size / 1e6:.0f}M weights")
    torch.manual_seed(0)
    model = kind(image_config(model_type, token)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                if weight.dim() >= 2:
                    weight.normal_(0, 0.12, generator=generator)
                elif not bool((weight == 1).all()):
                    weight.normal_(0, 0.05, generator=generator)
    model.save_pretrained(directory)
    write_processor(directory, model_type)
    return model
