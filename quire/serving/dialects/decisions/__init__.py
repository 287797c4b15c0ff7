"""OpenAI's Decisions, translated to one sampled token for each question."""
