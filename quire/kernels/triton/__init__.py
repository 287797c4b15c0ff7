"""Kernels in Triton for NVIDIA GPUs; `TRITON_INTERPRET=1` runs them on a CPU, slowly, for tests.

docs/gpu.md says which file is for what: products (`linear*`, `products`), experts (`experts*`, `expert_products`,
`routing`), attention (`attention_*`, `rotary`, `places`, `contexts`), drawing (`sampling`, `row_search`, `draw_rules`,
`keys`, `logprobs`, `penalties`), how kernels are launched (`launch`, `dependent_launch`, `precompiler`), and a file for
each of the rest of a step.
"""
