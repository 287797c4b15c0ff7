"""The module paths that vLLM's users type, for `python -m` and for imports."""
