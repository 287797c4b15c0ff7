"""Numbers about the running server: a plain Stats that inner rooms fill, and how it is shown."""
