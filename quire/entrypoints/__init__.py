"""Module paths that vLLM's guides type, leading to the `quire` command."""
