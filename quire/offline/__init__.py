"""Offline inference: `LLM`, and how it runs an engine in this process."""
