"""`quire bench`: the benchmarks that users run, one a file. Flag names and result names are vLLM's; see README.md."""
