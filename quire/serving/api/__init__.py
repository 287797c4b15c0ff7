"""HTTP on one side, EngineClient on the other: the OpenAI-compatible server. No model knowledge, no torch."""
