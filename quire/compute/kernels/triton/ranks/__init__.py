"""Kernels through which the cards of one host, a rank each, read and write one another's memory."""
