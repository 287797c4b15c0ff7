"""LangChain: OpenAIEmbeddings over documents and a query."""

import json
import sys

from langchain_openai import OpenAIEmbeddings

url, key, *texts = sys.argv[1:]
embeddings = OpenAIEmbeddings(model="tiny", base_url=url + "/v1", api_key=key, check_embedding_ctx_length=False)
shortened = OpenAIEmbeddings(
    model="tiny", base_url=url + "/v1", api_key=key, check_embedding_ctx_length=False, dimensions=8
)
seen = {
    "documents": embeddings.embed_documents(texts),
    "query": embeddings.embed_query(texts[0]),
    "shortened": shortened.embed_documents(texts),
}
print(json.dumps(seen))
