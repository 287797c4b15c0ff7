"""Speculative decoding in a worker: where draft tokens come from, and which of them are accepted.

Reading order: `lookup_drafter.py` (what proposes), `draft_model.py` and `draft_steps.py` (a draft model or head),
`adaptive.py` and `draft_lengths.py` (how many drafts pay), `step_drafts.py`, `verification.py` (which are accepted).
"""
