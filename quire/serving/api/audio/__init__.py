"""Transcripts and translations of what is said."""
