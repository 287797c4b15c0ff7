"""Kernels in Triton for NVIDIA GPUs; `TRITON_INTERPRET=1` runs them on a CPU, slowly, for tests.

    attention/  keys and values into the cache, and attention over it
    linear/     products with a weight
    experts/    products with those weights of a mixture that each token goes to
    sampling/   penalties, sampling and log probabilities: what is made of logits
    launching/  how kernels are launched and compiled, whatever they compute

and a file for each of the rest of a step. docs/gpu.md says which file is for what.
"""
