"""What the tests on a GPU share: when they run, and that a test's tensors are made there.

The functions of the other files make their tensors on torch's default device. With that set to the
GPU they are tests of it: test_gpu*.py import them, and add what only a GPU can show.
"""

from __future__ import annotations

import os

import pytest
import torch

#: Set where a GPU has to be there (gpu_check.py): then its absence fails, rather than skips.
REQUIRED = os.environ.get("SYNCBN_REQUIRE_GPU", "0") not in ("", "0")

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REQUIRED or torch.cuda.is_available()), reason="torch finds no GPU to test on"
    ),
]

several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def on_gpu():
    """Makes the GPU torch's default device; applies to the test files that import it."""
    assert torch.cuda.is_available(), "SYNCBN_REQUIRE_GPU is set, and torch finds no GPU"
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def take_gpu(rank: int) -> None:
    """Sets up a rank (distributed.run): the GPUs are dealt out in turn."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)


def same(actual, expected) -> bool:
    """Whether two sequences of tensors are the same bits."""
    return all(map(torch.equal, actual, expected))
