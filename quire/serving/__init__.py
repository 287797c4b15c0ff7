"""The server: HTTP API, dialects, supervisor of its processes, router, and the store of files and batches."""
