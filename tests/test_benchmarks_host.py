"""The question what a layer costs the host, and torch's own layer on the CPU for it."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from benchmarked import TINY, assert_spreads
from torch import nn

from benchmarks import host
from benchmarks.torch_on_cpu import KERNELS, torch_on_cpu


def test_torch_layers_run_their_own_code_and_refuse_the_cpu_again():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    layer = nn.SyncBatchNorm(3)
    before = {name: getattr(torch, name) for name in KERNELS}
    with host.fake_group():
        with torch_on_cpu():
            y = layer(x)
            y.sum().backward()
        assert type(y.grad_fn).__name__ == "SyncBatchNormBackward"
        assert y.shape == x.grad.shape == x.shape and layer.num_batches_tracked == 1
        with pytest.raises(ValueError, match="GPU"):
            layer(x)
    assert before == {name: getattr(torch, name) for name in KERNELS}


def test_torch_on_cpu_calls_as_many_operators_as_torch_itself():
    """The five kernels stay torch's operators, for which the dispatcher gets kernels on the CPU."""
    layer = nn.SyncBatchNorm(3)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)

    def step():
        layer(x).sum().backward()

    own = {name: getattr(torch, name) for name in KERNELS}
    with host.fake_group(), torch_on_cpu():
        ours = host.operators_of(step)
        with torch.library._scoped_library("aten", "IMPL") as library:
            for name, stand_in in KERNELS.items():
                library.impl(name, stand_in, "CPU")
            with patch.multiple(torch, **own):
                names = host.operators_of(step)
    assert ours == names > 20


def test_the_table_names_each_layer_and_the_bar():
    [row] = host.measure(TINY)
    assert row["operators"][host.OURS] < row["operators"][host.TORCH]
    assert_spreads(row["times_us"], {host.OURS, host.TORCH, host.PLAIN})
    text = host.table([row])
    assert all(name in text for name in (host.OURS, host.TORCH, host.PLAIN))
    [(_, bar, measured)] = host.bars([row])
    assert bar == ">= 3" and math.isclose(
        float(measured.split()[0]),
        row["ratios"][f"{host.TORCH} / {host.OURS}"]["p50"],
        rel_tol=0.01,
    )
