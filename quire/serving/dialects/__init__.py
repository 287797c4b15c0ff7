"""Other APIs, translated: Anthropic's Messages, Ollama, Cohere, OpenAI's Responses, Batches and Decisions."""
