"""What computes: kernels, attention backends, collectives between ranks, and the codes of GGUF."""
