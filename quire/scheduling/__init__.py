"""Which tokens are computed next, and where their keys and values lie: scheduler, KV cache blocks, draft tokens."""
