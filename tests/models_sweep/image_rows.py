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
    "<row_1_col_2> <row_2_col_1> <row_2_col_2> <loc0000> <boi> <eoi> ]<]image[>[ ]<]video[>[ <eof> <frame_start> "
    "<frame_end> <grounding>"
)
SPECIAL = [*_SPECIAL.split(), "]<]start of image[>[", "]<]end of image[>["]
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
    "img_line_break_token": "<|IMG_LINE_BREAK|>", "eof_token": "<eof>",
}  # fmt: skip
"""Special tokens by the names under which tokenizers have them."""
TEXT: dict[str, Any] = {"vocab_size": ROOM, "max_position_embeddings": 1536, "eos_token_id": None, "bos_token_id": 0}
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
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_CLIP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_SQUARE = {"size": {"height": 32, "width": 32}}
_CLIP_VISION = {"image_size": 32, "patch_size": 8}
_LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_MINICPM = {"images": {"scale_resolution": 64, "patch_size": 8},
            "vision": {"patch_size": 8, "image_size": 64}, "config": {"insert_layer_id": 1},
            "text": _GATED}  # fmt: skip
_PIXTRAL = {"images": {"size": {"longest_edge": 64}, "patch_size": 8}, "token": "[IMG]",
            "vision": {"patch_size": 8, "image_size": 64},
            "processor": {"patch_size": 8, "spatial_merge_size": 2}, "config": {"spatial_merge_size": 2}}  # fmt: skip
_SAM = {"hidden_size": 32, "num_attention_heads": 2, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48,
        "patch_size": 16, "image_size": 64, "num_hidden_layers": 2, "output_channels": 16}  # fmt: skip
_DOTS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_UNSCALED = {"logit_scale": 1.0}  # which transformers' classes with images leave out, and those of texts have
_PINS = [[32, 64], [64, 32], [64, 64]]

ROWS: dict[str, dict[str, Any]] = {
    "aria": {"processor": {"size_conversion": {"490": 8, "980": 8}}, "vision": {"image_size": 980, "patch_size": 14},
             "config": {"projector_patch_to_query_dict": {1225: 8, 4900: 8}}},
    "aya_vision": {"images": _SQUARE | {"crop_to_patches": True, "max_patches": 4}, "vision": _CLIP_VISION,
                   "processor": {"patch_size": 8, "img_size": 32, "downsample_factor": 2},
                   "token": "<|IMG_PATCH|>", "text": _UNSCALED, "config": {"downsample_factor": 2}},
    "chameleon": {"images": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
                  "processor": {"image_seq_length": 16},
                  "parts": {"vq_config": {"resolution": 32, "base_channels": 32, "channel_multiplier": [1, 1, 2, 2],
                                          "num_embeddings": 16, "embed_dim": 16, "latent_channels": 16}},
                  "config": {"vocabulary_map": {"<image>": IDS["<image>"], "<reserved08706>": IDS["<reserved08706>"]}
                             | {f"IMGIMG{chr(65 + place)}Z": 4 + place for place in range(16)}}},
    "cohere2_vision": {"images": _SQUARE | {"crop_to_patches": True, "max_patches": 4, "patch_size": 2},
                       "vision": _CLIP_VISION, "token": "<|IMG_PATCH|>", "text": _UNSCALED,
                       "tokens": {"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
                                  "eoi_token": "<|END_OF_IMG|>"}, "config": {"alignment_intermediate_size": 64}},
    "cohere_compass": _DEEP | {"token": "<|IMAGE_PAD|>", "tokens": {"image_token": "<|IMAGE_PAD|>"},
                               "images": _GRID["images"] | {"patch_size": 8},
                               "text": {"rope_parameters": {name: {"rope_type": "default", "rope_theta": 10000.0}
                                                            for name in ("full_attention", "sliding_attention")}}},
    "deepseek_ocr2": {"parts": {"vision_config": {"sam_config": _SAM | {"image_size": 1024,
                                                                         "downsample_channels": [24, 64]},
                                                  "encoder_config": {"hidden_size": 64}}},
                      "text": {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
                               "mlp_layer_types": ["dense"] * 4}},
    "deepseek_vl": {"images": {"size": {"height": 32, "width": 32}}, "processor": {"num_image_tokens": 16},
                    "vision": _CLIP_VISION},
    "deepseek_vl_hybrid": {"images": {"size": {"height": 32, "width": 32},
                                      "high_res_size": {"height": 64, "width": 64}},
                           "processor": {"num_image_tokens": 16}, "vision": _CLIP_VISION,
                           "parts": {"high_res_vision_config": _SAM}},
    "gemma3n": {"parts": {"vision_config": {"hidden_size": 2048, "model_args": {"channel_multiplier": 0.05}},
                          "text_config": {"intermediate_size": [96] * 4}}},
    "dots3_note": {"parts": {"vision_config": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 64,
                                               "adapter_out_dim": 64, "patch_size": 8},
                             "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}},
                   "text": {f"swa_{name}": size for name, size in _DOTS.items()} | {
                       "shared_experts_intermediate_size": 48, "index_topk": 16, "index_n_heads": 32},  # ties are rare
                   "token": "<|imgpad|>", "images": _GRID["images"] | {"temporal_patch_size": 1}},
    "fast_vlm": {"like": "llava", "processor": {"patch_size": 32, "vision_feature_select_strategy": "full",
                                                "num_additional_image_tokens": 0},
                 "parts": {"vision_config": {"architecture": "fastvit_mci0", "do_pooling": True, "global_pool": "avg",
                                             "hidden_size": 1024, "initializer_range": 0.02,
                                             "model_args": {"inference_mode": True}}},
                 "images": {"size": {"height": 64, "width": 64}, "crop_size": {"height": 64, "width": 64}}},
    "florence2": {"parts": {"vision_config": {"embed_dim": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
                                              "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2],
                                              "projection_dim": 64, "patch_size": [7, 3, 3, 3]}}},
    "emu3": {"images": {"min_pixels": 16 * 16, "max_pixels": 64 * 64, "spatial_factor": 8},
             "text": {"vocab_size": ROOM}},
    "ernie4_5_vl_moe": _GRID | {"images": {"size": _QWEN, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 1},
                                "vision": {"patch_size": 8, "hidden_size": 64, "num_heads": 4},
                                "text": {"moe_intermediate_size": [48, 32], "rope_parameters": {
                                    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}},
    "exaone4_5": _GRID | {"tokens": {"image_token": "<image>"}},
    "gemma3": {"images": _SQUARE | {"image_seq_length": 4}, "vision": _CLIP_VISION,
               "config": {"mm_tokens_per_image": 4}, "processor": {"image_seq_length": 4},
               "tokens": {"image_token": "<image_soft_token>"}, "token": "<image_soft_token>"},
    "gemma4": {"images": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
               "parts": {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "num_key_value_heads": 4,
                                           "position_embedding_size": 256, "hidden_size": 64, "head_dim": 16,
                                           "intermediate_size": 96, "num_hidden_layers": 2,
                                           "num_attention_heads": 4}},
               "text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0,
                        "vocab_size_per_layer_input": ROOM},
               "tokens": {"eoa_token": "<|AUDIO_eos|>"},
               "config": {"audio_token_id": IDS["<audio>"]}},
    "gemma4_unified": {"cache": "static", "images": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
                       "parts": {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32,
                                                   "mm_posemb_size": 140, "output_proj_dims": 32}},
                       "text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0,
                                "sliding_window": 128, "use_bidirectional_attention": "vision"},
                       "tokens": {"eoa_token": "<|AUDIO_eos|>"},
                       "config": {"audio_token_id": IDS["<audio>"]}},
    "glm4v": _GRID | {"text": _MROPE}, "glm46v": _GRID | {"text": _MROPE},
    "glm4v_moe": _GRID | {"text": _HALF, "like": "glm4v"}, "glm_ocr": _GRID | {"text": _MROPE, "like": "glm46v"},
    "got_ocr2": {"images": {"size": {"height": 256, "width": 256}}, "token": "<imgpad>",
                 "vision": _SAM | {"image_size": 256, "patch_size": 4}},
    "glm5_next": _GRID | {"text": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0}},
    "glmga": _GRID | {"text": _MROPE, "like": "glm46v"},
    "inkling_mm_model": {"vision": {"patch_size": 40, "text_hidden_size": 64}},
    "inkling2": {"images": {"size": {"height": 16, "width": 16}},
                 "vision": {"patch_size": 8, "text_hidden_size": 64, "projection_hidden_dim": 64}},
    "janus": {"images": {"size": {"height": 32, "width": 32}}, "processor": {"num_image_tokens": 16},
              "vision": {"image_size": 32, "patch_size": 8, "num_image_tokens": 16, "projection_dim": 64},
              "parts": {"vq_config": {"base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1, 1],
                                      "latent_channels": 32, "projection_dim": 64, "image_token_embed_dim": 64}}},
    "kimi_k25": {"images": {"patch_size": 8, "size": {"max_height": 64, "max_width": 64}}, "text": _LATENT,
                 "vision": {"patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8, "hidden_size": 64},
                 "config": {"projection_hidden_size": 64}},
    "lfm2_vl": {}, "llama4": {"text": {"num_experts_per_tok": 1}, "images": _SQUARE, "token": "<|patch|>",
                              "processor": {"patch_size": 8, "pixel_shuffle_ratio": 0.5},
                              "vision": _CLIP_VISION | {"vision_output_dim": 64, "projector_input_dim": 64,
                                                        "projector_output_dim": 64, "intermediate_size": 256}},
    "minicpm_ocr": {"images": {"scale_resolution": 64, "patch_size": 8}, "vision": {"patch_size": 8, "image_size": 64}},
    "minimax_m3_vl": _GRID | {"token": "]<]image[>[", "config": {"merged_hidden_size": 256},
                              "vision": {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}},
    "molmo2": {"images": {"size": {"height": 32, "width": 32}, "patch_size": 8, "overlap_margins": [1, 1]},
               "vision": {"image_size": [32, 32], "patch_size": 8, "num_position_embeddings": 16, "head_dim": 16},
               "parts": {"adapter_config": {"vision_feature_layer": [3, 1], "text_hidden_size": 64}},
               "token": "<im_patch>"},
    "muse_glimmer": {"images": {"patch_size": 8, "max_image_tokens": 16}, "token": "<|patch|>",
                     "vision": {"patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8, "hidden_size": 64},
                     "config": {"out_hidden_size": 64, "projector_hidden_size": 64}},
    "muse_spark": {"images": {"patch_size": 8, "max_image_tokens": 16},
                   "vision": {"patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8, "hidden_size": 64},
                   "parts": {"audio_config": {"hidden_sizes": [8, 16, 32, 64], "out_hidden_size": 64}},
                   "config": {"out_hidden_size": 256, "projector_hidden_size": 64}},
    "nemotron_h_omni": {"vision": {"video_temporal_patch_size": 2, "image_size": 64, "max_img_size": 128},
                        "config": {"vision_hidden_size": 64, "projector_hidden_size": 64}},
    "qwen2_5_omni_thinker": _GRID | {"config": {"vision_start_token_id": IDS["<|vision_start|>"]}, "text": _MROPE,
                                     "around": ("<|vision_start|>", "<|vision_end|>"),
                                     "like": "qwen2_5_vl", "processor_class": "Qwen2_5OmniProcessor"},
    "qwen3_omni_moe_thinker": _DEEP | {"config": {"vision_start_token_id": IDS["<|vision_start|>"]},
                                       "around": ("<|vision_start|>", "<|vision_end|>"),
                                     "like": "qwen2_5_vl", "processor_class": "Qwen3OmniMoeProcessor"},
    "qwen4_exp": _GRID | {"text": _GATED | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                                            "indexer_budget": 8, "indexer_compress_ratio": 2,
                                            "ngram_vocab_size_base": 64, "output_gate_type": "sigmoid"}},
    "step3p7": {"images": {"size": {"height": 64, "width": 64}, "patch_size": 32, "vision_patch_size": 8,
                           "downsampler_stride": 4, "max_image_size": 128},
                "vision": {"patch_size": 8, "image_size": 64}, "token": "<im_patch>",
                "text": {"sliding_window": 16, "num_sliding_attention_heads": 4,
                         "layer_types": ["full_attention", "sliding_attention"] * 2,
                         "rope_parameters": {name: {"rope_type": "default", "rope_theta": 10000.0}
                                             for name in ("full_attention", "sliding_attention")}}},
    "unlimited_ocr": {"images": {"size": {"height": 64, "width": 64}, "tile_size": 32},
                      "parts": {"vision_config": {"sam_config": _SAM | {"downsample_channels": [24, 64]},
                                                  "encoder_config": {"hidden_size": 64, "image_size": 64,
                                                                     "patch_size": 16}}},
                      "text": {"num_key_value_heads": 4}},
    "granite4_vision": {"images": _CLIP | {"image_grid_pinpoints": _PINS}, "vision": _CLIP_VISION,
                        "processor": _LLAVA | {"downsample_rate": "1/2"},
                        "config": {"image_grid_pinpoints": _PINS, "downsample_rate": "1/2",
                                   "deepstack_layer_map": [[-2, 1]], "spatial_target_layers": [2]}},
    "hunyuan_vl": _GRID | {"images": _GRID["images"] | {"temporal_patch_size": 1},
                           "text": {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_section": [2] * 4}},
                           "around": ("<|image_start|>", "<|image_end|>")},
    "hyperclovax_vision_v2": _GRID, "lfm3_vl": _GRID,
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
    "perception_lm": {"images": {"tile_size": 56, "max_num_tiles": 4, "vision_input_type": "vanilla"},
                      "processor": {"patch_size": 14, "pooling_ratio": 2},
                      "parts": {"vision_config": {"architecture": "vit_pe_core_large_patch14_336",
                                                  "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4,
                                                                 "img_size": [56, 56], "global_pool": "",
                                                                 "use_post_transformer_norm": False,
                                                                 "init_values": 0.1, "ref_feat_shape": [4, 4]}}},
                      "config": {"projector_pooling_ratio": 2, "vision_use_cls_token": True}},
    "shieldgemma2": {"images": _SQUARE | {"image_seq_length": 4}, "vision": _CLIP_VISION,
                     "config": {"mm_tokens_per_image": 4}, "processor": {"image_seq_length": 4},
                     "tokens": {"image_token": "<image_soft_token>"}, "token": "<image_soft_token>"},
    "cosmos3_edge": _GRID | {"text": _MROPE, "images": _GRID["images"] | {"temporal_patch_size": 1}},
    "granite_docling": {"images": _SQUARE, "vision": _CLIP_VISION | {"out_hidden_size": 64, "scale_factor": 2,
                                                                     "deepstack_visual_indexes": [0, 1]},
                        "processor": {"image_seq_len": 4}},
    "minicpmv4_6": _MINICPM, "minicpmv4_7": _MINICPM | {"like": "minicpmv4_6"},
    "mistral_large4": _PIXTRAL | {"text": _LATENT},
    "mistral3": _PIXTRAL,
    "ovis2": {"images": _SQUARE, "vision": _CLIP_VISION, "processor": {"image_seq_length": 16}, "token": "<IMG_ATOM>"},
    "paddleocr_vl": _GRID | {"text": _MROPE, "images": _GRID["images"] | {"temporal_patch_size": 1}},
    "pp_chart2table": {"images": {"size": {"height": 256, "width": 256}}, "token": "<imgpad>",
                       "vision": _SAM | {"image_size": 256, "patch_size": 4}},
    "paligemma": {"images": _SQUARE | {"image_seq_length": 16}, "vision": _CLIP_VISION},
    "qianfan_ocr": {"images": _SQUARE | {"crop_to_patches": True, "max_patches": 4},
                    "processor": {"image_seq_length": 4}, "token": "<IMG_CONTEXT>",
                    "vision": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "qwen2_vl": _GRID | {"vision": {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8, "depth": 2},
                         "text": _MROPE},
    "qwen2_5_vl": _GRID | {"text": _MROPE}, "qwen3_vl": _DEEP, "qwen3_5": _GRID | {"text": _GATED},
    "qwen3_5_moe": _GRID | {"text": _GATED}, "qwen3_vl_moe": _DEEP | {"like": "qwen3_vl"},
    "video_llama_3": _GRID | {"images": _GRID["images"] | {"temporal_patch_size": 1}},
    "cosmos3_omni": _DEEP | {"like": "qwen3_vl"},
    "smolvlm": {"images": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
                "vision": _CLIP_VISION, "processor": {"image_seq_len": 4}, "config": {"scale_factor": 2}},
    "video_llava": {"images": _CLIP, "vision": _CLIP_VISION, "processor": _LLAVA},
    "vipllava": {"images": _CLIP, "vision": _CLIP_VISION, "processor": _LLAVA,
                 "config": {"vision_feature_layers": [-2, -3]}},
}  # fmt: skip
"""By model type: `config` for the whole, `vision` and `text` for its parts, `parts` for all of these before they are
checked, `images` for the image processor, `processor` for what surrounds it, `tokens` for the tokenizer, `token` for
the one of vectors, `around` for what stands around images, `like` for a model type whose processors are its own, and
`cache` for that of `generate`: with a static one alone it asks a class for its own masks."""


def image_config(model_type: str, token: str) -> PreTrainedConfig:
    """Make a tiny config with tokens of the tokenizer."""
    kind, row = CONFIG_MAPPING[model_type], ROWS.get(model_type, {})
    parts = {f"{part}_config": row[part] for part in ("vision", "text") if part in row}
    values = tiny_config(kind, model_type, parts | row.get("parts", {})).to_dict()
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
