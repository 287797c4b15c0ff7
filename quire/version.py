"""The version of the package, for rooms that need nothing else of it."""

__version__ = "0.1.0"
