"""Towers: what models that see images put in the place of placeholder tokens."""
