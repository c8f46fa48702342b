"""``skip_nonfinite_update``: statistics that buffers cannot hold leave them as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from inputs import DTYPES, numpy, random
from test_operators import EPS, message, vectors
from torch import nn

from syncbn_cuda import (
    FastSyncBatchNorm,
    _checks,
    _composite,
    convert_sync_batchnorm,
    functional,
    revert_sync_batchnorm,
)

CHANNELS = 6


@pytest.fixture(params=["compiled", "composite"])
def kernels(request, compiled):
    return compiled if request.param == "compiled" else _composite


def inf(stats, largest):
    stats[2] = torch.inf


def minus_inf(stats, largest):
    stats[2] = -torch.inf


def nan(stats, largest):
    stats[CHANNELS + 2] = torch.nan


def too_large_a_mean(stats, largest):
    stats[2] = -1.1 * largest * stats[-1]


def too_large_a_variance(stats, largest):
    stats[CHANNELS + 2] = 1.1 * largest * stats[-1]


@pytest.mark.parametrize("plant", [inf, minus_inf, nan, too_large_a_mean, too_large_a_variance])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("dtype", "buffers"),
    [(d, b) for d in DTYPES for b in dict.fromkeys((torch.float32, d))],
    ids=str,
)
def test_what_buffers_cannot_hold_moves_none_of_them(kernels, dtype, buffers, momentum, plant):
    x = random((4, CHANNELS, 5), dtype)
    good = message(x)
    bad = good.clone()
    plant(bad, torch.finfo(buffers).max)
    moved = {}
    for stats, skip in ((good, False), (good, True), (bad, False), (bad, True)):
        running = [*vectors(buffers, 2, CHANNELS), torch.tensor(3)]
        before = copy.deepcopy(running)
        y = kernels.batch_norm_elemt_running(
            x, stats, None, None, EPS, *running, momentum, skip_nonfinite=skip
        )
        plain = kernels.batch_norm_elemt(x, stats, None, None, EPS)
        assert torch.equal(y.nan_to_num(), plain.nan_to_num())
        moved[stats is bad, skip] = [
            not torch.equal(new, old) for new, old in zip(running, before, strict=True)
        ]
    assert moved == {
        (False, False): [True] * 3,
        (False, True): [True] * 3,
        (True, False): [True] * 3,
        (True, True): [False] * 3,
    }


def train_rank(rank, batches, arguments, way):
    """The state after each batch, of which every rank has a part."""
    torch.manual_seed(0)
    layer = convert_sync_batchnorm(nn.BatchNorm1d(CHANNELS, **arguments))
    layer.skip_nonfinite_update = True
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if way == "compiled" else layer
    states = []
    for batch in batches:
        call(batch[rank].clone().requires_grad_()).sum().backward()
        states.append({key: numpy(value) for key, value in layer.state_dict().items()})
    return states


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ranks_skip_a_batch_alike(run, momentum, way):
    """A batch with Inf on one rank: the states are those without it, the same bits everywhere."""
    batches = [[random((3 + rank, CHANNELS, 4)) for rank in range(2)] for _ in range(3)]
    bad = copy.deepcopy(batches[1])
    bad[1][2, 3, 1] = torch.inf
    arguments = {"momentum": momentum}
    poisoned = run(2, train_rank, [batches[0], bad, *batches[1:]], arguments, way)
    healthy = run(2, train_rank, batches, arguments, way)
    expected = [healthy[0][step] for step in (0, 0, 1, 2)]
    for states in poisoned:
        for state, wanted in zip(states, expected, strict=True):
            for key, value in wanted.items():
                assert state[key].tobytes() == value.tobytes(), key
    assert not (healthy[0][0]["running_mean"] == healthy[0][1]["running_mean"]).any()


def function(layer, x):
    return functional.sync_batch_norm(
        *(x, layer.running_mean, layer.running_var, None, None, True),
        num_batches_tracked=layer.num_batches_tracked,
        skip_nonfinite_update=True,
    )


def derivative(layer, x):
    def of(x, buffers):
        return torch.func.functional_call(layer, buffers, (x,)).square().sum()

    torch.func.grad(of)(x, dict(layer.named_buffers()))


def without_float64(layer, x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checks, "lacks_float64", lambda input: True)
        patch.setattr(functional, "checking_kernels", lambda input: None)
        layer(x)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "call", [FastSyncBatchNorm.__call__, function, derivative, without_float64]
)
def test_every_way_to_train_skips(call, momentum):
    layer = FastSyncBatchNorm(CHANNELS, momentum=momentum, skip_nonfinite_update=True)
    x = random((4, CHANNELS, 5))
    call(layer, x)
    before = copy.deepcopy(layer.state_dict())
    bad = x.clone()
    bad[0, 1, 2] = torch.nan
    call(layer, bad)
    after = layer.state_dict()
    assert before["num_batches_tracked"] == 1
    assert all(torch.equal(after[key], before[key]) for key in before)
    call(layer, x)
    assert layer.num_batches_tracked == 2 and layer.running_mean.isfinite().all()


def test_conversion_sets_the_switch_and_reverting_removes_it():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    attributes = set(vars(net[0]))
    convert_sync_batchnorm(net, select="0", skip_nonfinite_update=True)
    convert_sync_batchnorm(net)
    assert [layer.skip_nonfinite_update for layer in net] == [True, False]
    assert [layer.skip_nonfinite_update for layer in copy.deepcopy(net)] == [True, False]
    assert repr(net[0]).endswith("track_running_stats=True, skip_nonfinite_update=True)")
    assert repr(net[1]).endswith("track_running_stats=True)")
    convert_sync_batchnorm(net, select="0", skip_nonfinite_update=False)
    assert not net[0].skip_nonfinite_update
    revert_sync_batchnorm(net)
    assert set(vars(net[0])) == set(vars(net[1])) == attributes
