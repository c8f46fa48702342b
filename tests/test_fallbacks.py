"""Where the operators do not serve: a device without float64, and no memory left."""

from __future__ import annotations

import pytest
import torch
from inputs import random
from torch import nn
from training import train_once

from syncbn_cuda import FastSyncBatchNorm, _checks, _composite, _transforms, functional


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_device_without_float64_serves_one_process(monkeypatch, momentum):
    monkeypatch.setattr(_checks, "lacks_float64", lambda input: True)
    monkeypatch.setattr(functional, "checking_kernels", lambda input: None)
    ours, theirs = FastSyncBatchNorm(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    for shape in ((4, 3, 5, 5), (0, 3, 5, 5), (2, 3, 5, 5)):
        x, dy = random(shape), random(shape)
        results = [train_once(layer, x, dy) for layer in (ours, theirs)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        if len(x) == 0:  # torch counts a batch of nothing
            theirs.num_batches_tracked -= 1
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)
    with pytest.raises(ValueError, match="expected input on a device with float64"):
        _checks.check_training(
            x.to("meta"), None, None, (None,) * 3, 0.1, 1e-5, object(), ours, False
        )


def test_transforms_of_one_process_need_no_float64(monkeypatch):
    monkeypatch.setattr(_checks, "lacks_float64", lambda input: True)
    monkeypatch.setattr(_transforms, "train", lambda *_: pytest.fail("computes in float64"))
    x, dx = random((4, 3, 5, 5)), random((4, 3, 5, 5))
    layers = [kind(3, track_running_stats=False) for kind in (FastSyncBatchNorm, nn.BatchNorm2d)]
    torch.testing.assert_close(*(torch.func.jvp(layer, (x,), (dx,)) for layer in layers))


@pytest.mark.parametrize("step", ["batch_norm_stats", "batch_norm_backward_reduce"])
def test_a_failed_allocation_is_torchs_own_error(monkeypatch, step):
    class Failing:
        def __getattr__(self, name):
            if name == step:
                raise RuntimeError("aoti_torch_empty failed")
            return getattr(_composite, name)

    def empty_like(tensor):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(functional, "checking_kernels", lambda input: Failing())
    layer, x = FastSyncBatchNorm(3), random((4, 3, 5, 5))
    with pytest.raises(torch.OutOfMemoryError), monkeypatch.context() as patch:
        y = layer(x) if step != "batch_norm_stats" else None
        patch.setattr(torch, "empty_like", empty_like)
        layer(x) if y is None else y.sum().backward()
