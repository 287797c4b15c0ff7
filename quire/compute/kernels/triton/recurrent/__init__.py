"""Ops that keep one state a sequence."""
