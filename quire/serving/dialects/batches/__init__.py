"""Batches of requests: those of /v1/batches, and those of `quire run-batch`."""
