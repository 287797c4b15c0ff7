"""Images that requests bring: where they come from, what they are, and what a model's tower gets of them. No torch."""
