"""What a training step keeps in memory: between forward and backward, and after many steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from inputs import DENSE

from syncbn_cuda import FastSyncBatchNorm

STATM = Path("/proc/self/statm")
PAGE = 4096


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_backward_keeps_the_input_and_three_vectors(layout, dtype, affine):
    channels = 16
    layer = FastSyncBatchNorm(channels, affine=affine)
    x = DENSE[layout](torch.randn(4, channels, 9, 7).to(dtype)).requires_grad_()
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum().backward()
    assert kept.pop(x.untyped_storage().data_ptr()) == x.untyped_storage().nbytes()
    message = 8 * (2 * channels + 1)
    assert sorted(kept.values()) == sorted([message] + [4 * channels] * affine)


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
