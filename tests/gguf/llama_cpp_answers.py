"""What llama.cpp computes on a GGUF file; run by an interpreter that has llama-cpp-python and numpy.

python llama_cpp_answers.py quantize SOURCE TARGET TYPES
python llama_cpp_answers.py logits FILE TOKENS.json OUT.npy
python llama_cpp_answers.py tokens FILE TEXTS.json OUT.json
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp
import numpy as np

_F32 = 0
"""The cache's type: llama.cpp's default, F16, would round."""


def quantize(source: str, target: str, types: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{types}")
    params.nthread = 1
    assert llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) == 0


def logits(file: str, tokens_file: str, out: str) -> None:
    with open(tokens_file) as source:
        tokens = json.load(source)
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = _F32
    params.flash_attn_type = 0
    params.swa_full = True
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    values = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    np.save(out, np.ctypeslib.as_array(values, (len(tokens), size)).copy())


def tokens(file: str, texts_file: str, out: str) -> None:
    with open(texts_file) as source:
        texts = json.load(source)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    vocabulary = llama_cpp.llama_model_get_vocab(llama_cpp.llama_model_load_from_file(file.encode(), params))
    found = []
    for text in texts:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 16))()
        count = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, len(ids), True, True)
        found.append(list(ids[:count]))
    with open(out, "w") as target:
        json.dump(found, target)


if __name__ == "__main__":
    {"quantize": quantize, "logits": logits, "tokens": tokens}[sys.argv[1]](*sys.argv[2:])
