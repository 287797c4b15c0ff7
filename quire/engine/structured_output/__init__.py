"""Structured output: a request's constraint becomes a grammar, and the grammar says which tokens may come next.

Grammars are untrusted and may be made to explode. So the API process and `LLM` have each new constraint translated and
compiled by a helper process that is killed when it takes too long (`checker.py`). The grammar's text goes to the
engine, which compiles it once more, for the model's tokens, and follows its sequences (`masks.py`). Both start with the
first constraint that they see, so a server without any pays nothing.
"""
