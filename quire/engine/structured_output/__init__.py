"""Structured output: a request's constraint becomes a grammar, and the grammar says which tokens may come next.

Grammars are untrusted and may be made to explode, so no process that serves ever compiles one. The API process and
`LLM` have each new constraint translated and tried by a helper process that is killed when it takes too long
(`checker.py`); what it lets pass goes to the engine as the text of a grammar. The engine has one other process that
compiles these for the model's tokens and fills bitmasks (`bitmask_source.py`). Both start with the first constraint
that they see, so a server without any pays nothing.
"""
