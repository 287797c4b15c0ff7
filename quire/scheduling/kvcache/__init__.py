"""Which block holds which tokens, never the bytes: the pool of blocks and the tables of sequences. No torch."""
