"""Waiting for descriptors whose numbers may be large, as those of inherited ones are."""

from __future__ import annotations

import select


def wait_readable(*descriptors: int) -> list[int]:
    """Until one of them is readable, or its other end is gone; returns those that are."""
    poll = select.poll()  # select has no room for numbers from 1,024 on
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]
