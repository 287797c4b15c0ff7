"""An engine on CPUs imports torch without its kernels for the meta device, which are there for whoever wants them."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import sys
from quire.foundation.processes import late_meta_kernels
late_meta_kernels.leave_out()
import torch
assert not {"torch._decomp", "torch._refs", "torch._prims"} & sys.modules.keys(), "torch has imported them after all"
ids, table = torch.zeros(3, dtype=torch.int64, device="meta"), torch.empty(5, 4, device="meta")
"""
_CHECK = """
print(tuple(torch.nn.functional.embedding(ids, table).shape))
import torch._decomp, torch._meta_registrations
assert torch._decomp.__spec__.submodule_search_locations and torch._decomp.decomposition_table
assert torch._meta_registrations.meta_bernoulli and late_meta_kernels.load() is None
"""


@pytest.mark.parametrize(
    "wanted",
    [
        "import torch._refs",
        "from torch._meta_registrations import meta_bernoulli",
        "assert torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item() == 2",
    ],
)
def test_whoever_wants_the_kernels_gets_them(wanted: str) -> None:
    code = "\n".join((_START, wanted, _CHECK))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "(3, 4)"), done.stderr
