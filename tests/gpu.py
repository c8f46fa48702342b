"""What the tests on a GPU share: when they run, and that a test's tensors are made there.

The functions of the other files make their tensors on torch's default device. With that set to the
GPU they are tests of it: test_gpu*.py import them, and add what only a GPU can show.
"""

from __future__ import annotations

import os

import distributed
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


@pytest.fixture(params=["gloo", "nccl"])
def run(request):
    """Starts ranks on GPUs: over Gloo they may share one, over NCCL each needs its own."""

    def start(world_size, function, *args):
        count = torch.cuda.device_count()
        if request.param == "nccl" and count < world_size:
            pytest.skip(f"NCCL needs {world_size} GPUs for as many ranks, here is {count}")
        return distributed.run(world_size, function, *args, backend=request.param, setup=take_gpu)

    return start


def capture(step, stream=None, warm_ups=3):
    """Warms a step up and captures it as torch.cuda.graph asks; returns the graph and outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()
    return graph, outputs


def same(actual, expected) -> bool:
    """Whether two sequences of tensors are the same bits."""
    return all(map(torch.equal, actual, expected))
