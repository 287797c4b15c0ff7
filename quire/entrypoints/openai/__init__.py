"""Module paths of vLLM's OpenAI-compatible server, leading to the `quire` command."""
