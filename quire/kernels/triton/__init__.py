"""Kernels in Triton for NVIDIA GPUs; `TRITON_INTERPRET=1` runs them on a CPU, slowly, for tests."""
