"""The offline front door: `LLM`, and what turns the engine of this process for it."""
