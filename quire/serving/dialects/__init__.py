"""Other APIs as translations to one chat request: Anthropic's Messages, Ollama, OpenAI's Responses and Batches."""
