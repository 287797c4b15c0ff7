"""LiteLLM: embeddings through three of its providers, and reranking through two."""

import json
import sys

import litellm

url, key, *texts = sys.argv[1:]
litellm.num_retries = 0
bases = {"openai": url + "/v1", "hosted_vllm": url + "/v1", "ollama": url}
seen = {}
for provider, base in bases.items():
    answer = litellm.embedding(model=f"{provider}/tiny", input=texts, api_base=base, api_key=key)
    seen[provider] = [item["embedding"] for item in answer.data]
for provider in ("hosted_vllm", "jina_ai"):
    answer = litellm.rerank(
        model=f"{provider}/tiny", query=texts[0], documents=texts, top_n=2, api_base=url + "/v1/rerank", api_key=key
    )
    seen[f"{provider} rerank"] = [[item["index"], item["relevance_score"]] for item in answer.results]
print(json.dumps(seen))
