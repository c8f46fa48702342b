"""What a training step keeps in memory: between forward and backward, and after many steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from inputs import DENSE, DTYPES

from syncbn_cuda import FastSyncBatchNorm

STATM = Path("/proc/self/statm")
PAGE = 4096


def kept_by(step) -> dict[int, int]:
    """Returns the bytes of each storage that a step keeps for a backward."""
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return kept


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_backward_keeps_the_input_and_three_vectors(layout, dtype, affine):
    channels = 16
    layer = FastSyncBatchNorm(channels, affine=affine)
    x = DENSE[layout](torch.randn(4, channels, 9, 7).to(dtype)).requires_grad_()
    kept = kept_by(lambda: layer(x).sum().backward())
    assert kept.pop(x.untyped_storage().data_ptr()) == x.untyped_storage().nbytes()
    message = 8 * (4 * channels + 1)
    assert sorted(kept.values()) == sorted([message] + [4 * channels] * affine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_derivative_keeps_five_float64_copies(dtype):
    x = torch.randn(4, 16, 9, 7).to(dtype).requires_grad_()
    y = FastSyncBatchNorm(16)(x)
    results = []
    kept = kept_by(lambda: results.append(torch.autograd.grad(y, x, y, create_graph=True)))
    assert len([size for size in kept.values() if size == 8 * x.numel()]) == 5
    assert max(kept.values()) == 8 * x.numel()


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say what memory is in use")
def test_200_steps_keep_nothing():
    layer = FastSyncBatchNorm(4096)
    x = torch.randn(8, 4096, requires_grad=True)

    def grown_after(steps: int) -> int:
        before = int(STATM.read_text().split()[1])
        for _ in range(steps):
            layer.zero_grad()
            (x.grad,) = torch.autograd.grad(layer(x).square().sum(), x)
        gc.collect()
        return PAGE * (int(STATM.read_text().split()[1]) - before)

    grown_after(50)  # what is allocated once
    message = 8 * (2 * layer.num_features + 1)
    assert grown_after(200) < 200 * message / 4
