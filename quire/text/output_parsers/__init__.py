"""What a model wrote, taken apart: reasoning, content and tool calls, from text that arrives in pieces."""
