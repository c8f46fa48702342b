"""What holds for every batch, tried with thousands of drawn ones (properties.py).

In one process with the compiled operators and with the emulated CUDA ones, and over up to four
ranks: these start once a property, the first draws cases and checks, and the others serve.
"""

from __future__ import annotations

import math
import time
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist
from emulator import operators
from properties import CASES, SEED, batch, factor_of, order_of, pieces, search, step, train_alone
from roundings import Near, assert_near, exact, found, whole

from syncbn_cuda import _library

WORLDS = 4


def joined(train, case):
    """Returns what came of a case over all its ranks, and what is right."""
    return whole([found(rank) for rank in train(case)]), whole(exact(case, pieces(case)))


def assert_agree(train, case, other, added=None, rows=None):
    """Asserts that two cases differ by rounding alone.

    Once something is added to results of the other, and its samples are taken in an order.
    """
    (ours, bounds), (theirs, others) = joined(train, case), joined(train, other)
    for name, near in theirs.items():
        values, slack = near.values + (added or {}).get(name, 0.0), others[name].slack
        if rows is not None and name in ("y", "dx"):
            values, slack = values[rows], slack[rows]
        assert_near({name: ours.pop(name)}, {name: Near(values, slack + bounds[name].slack)})
    assert not ours, f"only one has {[*ours]}"


def same_bits(a, b):
    dense = (t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.equal(*(t.view(torch.uint8) for t in dense))


def assert_scaled(train, case, other, factors):
    """Asserts that some results are the other's times a power of two, to the bit.

    Next to zero a type has fewer bits: there they differ by no more than its smallest number.
    """
    for ours, theirs in zip(train(case), train(other), strict=True):
        assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
        for name in factors.keys() & ours.keys():
            factor = factors[name]
            actual, base = ours[name], theirs[name]
            expected = (base.double() * factor).to(actual.dtype)
            info = torch.finfo(actual.dtype)
            near_zero = torch.minimum(actual.abs(), base.abs()) < info.smallest_normal
            slack = near_zero.double() * info.smallest_normal * info.eps * max(1.0, abs(factor))
            off = (actual != expected) & ~((actual.double() - expected.double()).abs() <= slack)
            assert not off.any(), f"{name}: {int(off.sum())} of {off.numel()} differ in their bits"


# Each property takes how to train, train(case) -> what comes of it by rank, and a case.


def steps_are_right(train, case):
    ranks = train(case)
    for result, expected in zip(ranks, exact(case, pieces(case)), strict=True):
        assert_near(found(result), expected)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if case.track:
                assert same_bits(result[name], ranks[0][name]), f"{name} differs between ranks"


def two_runs_give_the_same_bits(train, case):
    for first, second in zip(train(case), train(case), strict=True):
        for name, value in first.items():
            assert same_bits(value, second[name]), f"{name} differs in its bits"


def strides_change_no_value(train, case):
    assert_agree(train, case, case._replace(strides=("contiguous", "contiguous")))


def a_power_of_two_scales_to_the_bit(train, case):
    gain, sign = case.factor, np.sign(case.factor)
    scaled = case._replace(gain=gain, eps=case.eps * gain**2, weight_gain=sign)
    factors = {"grad weight": sign, "grad bias": 1.0}
    factors |= {"running_mean": gain, "running_var": gain**2}
    factors |= {"y": 1.0, "dx": 1 / gain} if case.affine else {"y": sign, "dx": 1 / abs(gain)}
    assert_scaled(train, scaled, case, factors)


def a_shift_moves_the_running_mean_alone(train, case):
    largest = float(batch(case)[0].abs().max()) if case.shape[0] else 1.0
    grid = 2.0 ** np.ceil(np.log2(max(largest, 1e-6)) + 4)
    case = case._replace(grid=grid)
    moved = {"running_mean": grid * factor_of(case)}
    assert_agree(train, case._replace(shift=grid), case, added=moved)


def gains_of_weight_and_bias_change_output_and_slope_alone(train, case):
    gain = case.factor
    same = dict.fromkeys(("grad weight", "grad bias", "running_mean", "running_var"), 1.0)
    for weight_gain, bias_gain, outputs in (
        (gain, gain, {"y": gain}),
        (gain, 1, {}),
        (1, gain, {}),
    ):
        changed = case._replace(weight_gain=weight_gain, bias_gain=bias_gain)
        factors = outputs | {"dx": weight_gain}
        if not case.affine:
            factors = dict.fromkeys(factors, 1.0)
        assert_scaled(train, changed, case, same | factors)


def splits_over_ranks_agree(train, case):
    for world in range(2, WORLDS + 1):
        assert_agree(train, case._replace(world=world), case._replace(world=1))


def the_order_of_samples_changes_no_value(train, case):
    ordered = case._replace(order=case.seed + 1)
    size = math.prod(case.shape[2:])
    rows = order_of(ordered)[:, None] * size + torch.arange(size)
    assert_agree(train, ordered, case, rows=rows.flatten().numpy())


ALONE = [
    steps_are_right,
    two_runs_give_the_same_bits,
    strides_change_no_value,
    a_power_of_two_scales_to_the_bit,
    a_shift_moves_the_running_mean_alone,
    gains_of_weight_and_bias_change_output_and_slope_alone,
    the_order_of_samples_changes_no_value,
]
OVER_RANKS = [*ALONE, splits_over_ranks_agree]


@pytest.fixture(scope="module")
def tally(report):
    """Counts the cases of all properties, for a line at the end."""
    counts, began = [], time.monotonic()
    yield counts.append
    seconds = time.monotonic() - began
    text = f"{sum(counts)} cases of {len(counts)} properties in {seconds:.0f} s, seed {SEED}"
    report("drawn cases", text)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize("kernels", ["compiled", "emulated"])
@pytest.mark.parametrize("holds", ALONE, ids=lambda holds: holds.__name__)
def test_for_every_batch_of_one_process(holds, kernels, monkeypatch, tally):
    if kernels == "emulated":
        monkeypatch.setattr(_library._available, "compiled", operators.kernels())
    tally(search(holds, train_alone))


class Apart(BaseException):
    """Ranks that no longer meet in their collectives: no smaller case can be tried with them."""


def search_rank(rank, holds):
    """Draws and checks on the first rank; the others train on the cases that it sends."""
    groups = [dist.new_group([*range(world)]) for world in range(1, WORLDS + 1)]
    control = dist.new_group(backend="gloo")

    def trained(case):
        if rank >= case.world:
            return None
        try:
            return step(case, *pieces(case)[rank], groups[case.world - 1])
        except Exception:
            return traceback.format_exc()

    def train(case):
        dist.broadcast_object_list([case], 0, control)
        results = [None] * WORLDS
        dist.gather_object(trained(case), results, 0, control)
        results = results[: case.world]
        raised = [f"rank {r}: {told}" for r, told in enumerate(results) if isinstance(told, str)]
        if 0 < len(raised) < case.world:
            raise Apart("\n".join([*raised, repr(case)]))
        assert not raised, "\n".join(raised)
        return results

    if rank == 0:
        count = search(holds, train, worlds=WORLDS)
        dist.broadcast_object_list([None], 0, control)
        return count
    while True:
        sent = [None]
        dist.broadcast_object_list(sent, 0, control)
        if sent[0] is None:
            return 0
        dist.gather_object(trained(sent[0]), None, 0, control)


@pytest.mark.parametrize("holds", OVER_RANKS, ids=lambda holds: holds.__name__)
def test_for_every_batch_and_split_over_ranks(run, holds, tally):
    tally(run(WORLDS, search_rank, holds, timeout=120 + 2 * CASES)[0])


def has_few_channels(train, case):
    assert case.shape[1] < 10


def test_a_property_that_fails_tells_its_smallest_case_and_the_seed():
    with pytest.raises(AssertionError) as raised:
        search(has_few_channels, train_alone, count=200, seed=7)
    told = str(raised.value)
    assert "has_few_channels fails: AssertionError" in told and "PROPERTY_SEED=7" in told
    assert "shape=(0, 10)" in told
