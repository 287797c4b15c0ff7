"""Cohere's embeddings, translated to texts that are pooled."""
