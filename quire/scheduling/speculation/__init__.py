"""Guessing what comes next from what there is."""
