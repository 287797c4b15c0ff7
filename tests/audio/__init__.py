"""Sounds: features, encoders and transcripts."""
