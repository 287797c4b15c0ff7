"""Embeddings, pooling, classification, scores and reranking over HTTP, with an engine that pools by a rule."""
