"""See `quire.entrypoints`."""
