"""LlamaIndex: OpenAILikeEmbedding over texts, one by one and together."""

import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

url, key, *texts = sys.argv[1:]
model = OpenAILikeEmbedding(model_name="tiny", api_base=url + "/v1", api_key=key, embed_batch_size=2)
seen = {"batch": model.get_text_embedding_batch(texts), "query": model.get_query_embedding(texts[0])}
print(json.dumps(seen))
