"""Cohere's client: vectors in several forms, and reranking."""

import json
import sys

import cohere

url, key, *texts = sys.argv[1:]
client = cohere.ClientV2(api_key=key, base_url=url)
types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
embedded = client.embed(model="tiny", texts=texts, input_type="search_query", embedding_types=types)
ranked = client.rerank(model="tiny", query=texts[0], documents=texts, top_n=2)
found = embedded.embeddings
seen = {
    "vectors": {"float": found.float_, **{name: getattr(found, name) for name in types[1:]}},
    "texts": embedded.texts,
    "ranks": [[item.index, item.relevance_score] for item in ranked.results],
    "tokens": embedded.meta.billed_units.input_tokens,
}
print(json.dumps(seen))
