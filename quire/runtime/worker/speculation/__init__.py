"""Draft tokens in a step: where they come from, and which of them stay."""
