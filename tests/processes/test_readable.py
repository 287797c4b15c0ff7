"""Also descriptors of large numbers are waited for."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from quire.foundation.processes.pipe_lines import wait_readable


def test_what_is_readable_is_found_whatever_its_number() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2_048:
        pytest.skip("this process may have no such number")
    small = os.eventfd(0, os.EFD_NONBLOCK)
    large = fcntl.fcntl(small, fcntl.F_DUPFD, 1_500)
    quiet = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.eventfd_write(small, 1)
        assert large >= 1_500
        assert wait_readable(quiet, large) == [large]
    finally:
        for descriptor in (small, large, quiet):
            os.close(descriptor)
