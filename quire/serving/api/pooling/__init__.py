"""Endpoints that make vectors, labels and scores of texts: embeddings, pooling, classify, score and rerank."""
