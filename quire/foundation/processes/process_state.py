"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """A letter, as proc(5) has it (T: stopped); empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
