"""Draft tokens in a step: where they come from, and which of them stay.

In reading order: `drafters.py` (what proposes), `draft_model.py` and `draft_steps.py` (a draft model or head),
`adaptive.py` and `draft_lengths.py` (how many drafts pay), `step_drafts.py`, `verification.py` (which stay).
"""
