"""The channel to a helper process."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import closing

import pytest

from quire.foundation.processes.helper_process import Channel, ChannelClosed

_SELECT_TAKES = 1024
"""`select.select` takes descriptors below this number."""


def test_a_channel_works_above_the_descriptors_that_select_takes() -> None:
    """A server with a thousand connections starts helpers too."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= _SELECT_TAKES + 2:
        pytest.skip("this process may not open so many descriptors")
    own, its = socket.socketpair()
    high = os.dup2(own.fileno(), _free_above(_SELECT_TAKES))
    own.close()
    with closing(Channel[str, str](socket.socket(fileno=high), str)) as channel, its:
        assert channel.receive(0.0) is None
        sender = Channel[str, str](its, str)
        sender.send("hello")
        assert channel.receive(None) == "hello"
        its.close()
        with pytest.raises(ChannelClosed):
            channel.receive(None)


def _free_above(number: int) -> int:
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return next(each for each in range(number, number + len(used) + 1) if each not in used)
