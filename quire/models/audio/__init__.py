"""Encoders of sounds, whose states a decoder's layers see whole."""
