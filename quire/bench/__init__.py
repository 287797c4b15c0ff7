"""`quire bench`: load generation and reports, one benchmark a file. Flag names and result names are vLLM's."""
