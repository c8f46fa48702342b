"""The CUDA kernels without a GPU: each launcher, run by the emulator, against the reference.

Tensors lie between guards of NaN and start at every misalignment asked for, outputs start as NaN,
and small emulated cards force each way of splitting a channel over blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from emulator.build import load
from emulator.cases import (
    CHANNELS_LAST,
    CONTIGUOUS,
    EMPTY,
    EPS,
    LAYOUTS,
    Guarded,
    Layout,
    Run,
    rounding,
    to_numpy,
)
from inputs import DTYPES, assert_close, numpy
from reference import split_message


@pytest.fixture(scope="module")
def emulator(report):
    yield load()
    schedules = sum(map(len, Run.schedules.values()))
    report("emulator", f"{len(Run.schedules)} cases, {schedules} schedules of their kernels")


# Aligned; misaligned alike (for contiguous rows still full packs); not alike (single values).
OFFSETS = [(0, 0, 0), (1, 1, 1), (1, 0, 3)]

SCHEDULES = 24

every_case = pytest.mark.parametrize("offsets", OFFSETS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(tuple(layout)))


@every_case
@every_dtype
@every_layout
def test_stats(emulator, layout, dtype, offsets):
    run = Run(emulator, layout, dtype, offsets)
    stats = run.stats()
    values = np.moveaxis(numpy(run.x), 1, 0).reshape(layout.C, -1)
    largest = float(np.abs(values).sum(1).max())
    sums, squares, count = split_message(stats)
    assert_close(sums, values.sum(1), rounding(dtype), 32, scale=largest)
    assert_close(squares, (values**2).sum(1), rounding(dtype), 32)
    assert count == layout.N * layout.S


@every_case
@every_dtype
@every_layout
def test_elemt(emulator, layout, dtype, offsets):
    run = Run(emulator, layout, dtype, offsets)
    both = np.concatenate([numpy(run.x), numpy(run.other)])
    for parameters in (torch.float32, dtype):
        weight, bias = run.weight.to(parameters), run.bias.to(parameters)
        expected = reference.forward(both, numpy(weight), numpy(bias), EPS).output[: layout.N]
        assert_close(run.elemt(to_numpy(weight), to_numpy(bias)), expected, dtype)
    assert_close(run.elemt(), reference.forward(both, eps=EPS).output[: layout.N], dtype)


@pytest.mark.parametrize("momentum", [0.1, None])
@every_dtype
# More channels than threads, then fewer: the threads of several warps.
@pytest.mark.parametrize(
    "layout", [CONTIGUOUS[4], CHANNELS_LAST[6], CHANNELS_LAST[8], *EMPTY], ids=str
)
def test_elemt_running(emulator, layout, dtype, momentum):
    for buffers in {torch.float32, dtype}:
        run = Run(emulator, layout, dtype)
        running = [Guarded(v.abs().to(buffers), 1) for v in (run.bias, run.weight)]
        before = [r.read() for r in running]
        counter = np.array([3])
        y = run.elemt(
            running_mean=running[0].array,
            running_var=running[1].array,
            num_batches_tracked=counter,
            momentum=momentum,
        )
        np.testing.assert_array_equal(y, run.elemt())
        assert counter == (4 if run.message[-1] else 3)
        if run.message[-1]:
            batch = reference.forward(np.concatenate([numpy(run.x), numpy(run.other)]))
            before = reference.running(*before, batch, 0.25 if momentum is None else momentum)
        for actual, expected in zip(running, before, strict=True):
            assert_close(actual.read(), expected, buffers, ulps=2)


# Channels beyond the threads of a block, and several blocks that own buffers.
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("channel", [0, 1, -1])
@pytest.mark.parametrize("layout", [Layout(2, 1100, 3), Layout(6, 1100, 1, True)], ids=str)
def test_what_buffers_cannot_hold_moves_none(emulator, layout, channel, momentum):
    for value in (0.0, np.inf, -np.inf, np.nan, 4e38, -4e38):
        run = Run(emulator, layout, torch.float32)
        run.message[: layout.C][channel] += value * run.message[-1]
        running = [Guarded(v.float().abs(), 1) for v in (run.bias, run.weight)]
        before = [r.read() for r in running]
        counter = np.array([3])
        run.elemt(
            running_mean=running[0].array,
            running_var=running[1].array,
            num_batches_tracked=counter,
            momentum=momentum,
            skip_nonfinite=True,
        )
        moved = np.stack([r.read() != b for r, b in zip(running, before, strict=True)])
        assert counter == (3 if value else 4)
        assert not moved.any() if value else moved.mean() > 0.99


@every_case
@every_dtype
@every_layout
def test_backward(emulator, layout, dtype, offsets):
    run = Run(emulator, layout, dtype, offsets)
    both_dy = np.concatenate([numpy(run.dy), numpy(run.other_dy)])
    both = np.concatenate([numpy(run.x), numpy(run.other)])
    mean = reference.forward(both).mean.reshape(1, -1, 1)
    centred = numpy(run.dy) * (numpy(run.x) - mean)
    invstd = 1 / np.sqrt(reference.forward(both).var + EPS)
    largest = float(max(np.abs(centred).sum((0, 2)).max(), np.abs(both_dy).sum((0, 2)).max()))

    sums, grad_weight, grad_bias = run.backward_reduce(torch.float32, dtype)
    expected = [numpy(run.dy).sum((0, 2)), centred.sum((0, 2))]
    assert_close(sums, np.concatenate(expected), rounding(dtype), scale=largest)
    assert_close(grad_weight, expected[1] * invstd, torch.float32, scale=largest * invstd.max())
    assert_close(grad_bias, expected[0], dtype, scale=largest)
    np.testing.assert_array_equal(run.backward_reduce()[0], sums)

    right = reference.backward(both_dy, both, numpy(run.weight.float()), EPS)
    total = np.concatenate([right.sum_dy, right.sum_dy_xmu])
    dx = run.backward_elemt(total, numpy(run.weight.float()).astype(np.float32))
    assert_close(
        dx, right.input[: layout.N], dtype, scale=float(np.abs(both_dy).max() * invstd.max())
    )


@pytest.mark.parametrize("layout", [Layout(1, 8, 140_000), Layout(300_001, 1, 1, True)], ids=str)
def test_long_sums_lose_no_digit(emulator, layout):
    test_stats(emulator, layout, torch.float32, (0, 0, 0))
    test_backward(emulator, layout, torch.float32, (0, 0, 0))


def test_a_variance_that_rounding_left_negative_is_zero(emulator):
    run = Run(emulator, CHANNELS_LAST[1], torch.float32)
    C = run.layout.C
    run.message = np.array([0.0] * C + [-1.0] * C + [0.0] * 2 * C + [10.0])
    assert_close(run.elemt(), numpy(run.x) / np.sqrt(EPS), torch.float32)


@pytest.mark.parametrize("layout", EMPTY, ids=str)
def test_an_empty_tensor_launches_nothing(emulator, layout):
    run = Run(emulator, layout, torch.float32)
    assert np.isnan(run.stats()).all()
    sums, grad_weight, _ = run.backward_reduce(torch.float32)
    assert np.isnan(sums).all() and np.isnan(grad_weight).all()
    assert run.backward_elemt(np.zeros(2 * layout.C)).size == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 4999, sms=2), Layout(2, 8, 1500, True, sms=2)], ids=str
)
def test_a_large_mean_cancels_nothing(emulator, layout, dtype):
    run = Run(emulator, layout, dtype, mean=1e5)
    run.message = run.stats()
    expected = reference.forward(numpy(run.x), eps=EPS).output
    assert np.abs(run.elemt() - expected).max() <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layout", [Layout(4, 5, 99), Layout(4, 5, 99, True)], ids=str)
def test_an_outlier_or_a_nan_stays_in_its_channel(emulator, layout):
    run = Run(emulator, layout, torch.float32)
    clean = run.message = run.stats()
    clean_sums = run.backward_reduce()[0]
    # The last one shares its pack with the next channel.
    run.x[0, 1, 0], run.x[0, 2, 0], run.x[1, 3, 98] = 1e15, torch.nan, torch.inf
    run.message = stats = run.stats()
    sums = run.backward_reduce()[0]
    for c in (0, 4):
        assert (stats[c:-1:5] == clean[c:-1:5]).all() and (sums[c::5] == clean_sums[c::5]).all()
    expected = reference.forward(numpy(run.x[:, 1:2]), eps=EPS).output
    assert_close(run.elemt()[:, 1:2], expected, torch.float32)
    assert np.isnan(stats[7]) and not np.isfinite(stats[8])


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(
    "layout", [Layout(1, 2, 20_000, sms=2), Layout(40, 3, 500), Layout(1, 4, 20_000, True)], ids=str
)
def test_an_outlier_at_either_end_costs_no_digit(emulator, layout, place):
    run = Run(emulator, layout, torch.float64)
    run.x[place, :, place] = 1e6
    *sums, count = split_message(run.stats().astype(np.longdouble))
    mean, square = (part / count for part in sums)
    x = np.moveaxis(numpy(run.x).astype(np.longdouble), 1, 0).reshape(layout.C, -1)
    np.testing.assert_allclose(square - mean**2, x.var(1), rtol=1e-14)


def test_totals_remember_what_their_roundings_lose(emulator):
    """Of threads with many batches; what is left is what the sums within a batch round."""
    run = Run(emulator, Layout(40, 8, 500, sms=1), torch.float32)
    _, squares, _ = split_message(run.stats())
    values = np.moveaxis(numpy(run.x).astype(np.longdouble), 1, 0).reshape(8, -1)
    off = squares / (values**2).sum(1) - 1
    assert np.sqrt(np.mean(off**2)) <= 0.04 * torch.finfo(torch.float32).eps  # else about 0.07


@every_dtype
@pytest.mark.parametrize("layout", [Layout(20, 2, 21), Layout(20, 8, 1, True)], ids=str)
def test_offsets_beyond_32_bits(emulator, layout, dtype):
    """The same plan with rows so far apart that the tensor has 20 times 2^31 values."""
    results = []
    for row_stride in (0, 2**31 + layout.C * layout.S):
        run = Run(emulator, layout, dtype, row_stride=row_stride)
        sums, _, grad_bias = run.backward_reduce(None, torch.float32)
        results.append([run.stats(), run.elemt(), sums, grad_bias, run.backward_elemt(sums)])
    for near, far in zip(*results, strict=True):
        np.testing.assert_array_equal(near, far)


# One block a channel; several, that meet in one place; in two; and the same for channels-last.
@pytest.mark.parametrize(
    "layout", [CONTIGUOUS[4], *CONTIGUOUS[7:], *CHANNELS_LAST[6:7], *CHANNELS_LAST[8:]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_every_schedule_gives_the_same_bits(emulator, layout, dtype):
    results = []
    for seed in range(SCHEDULES):
        run = Run(emulator, layout, dtype, seed=seed, blocks_alive=1 + seed % 8)
        running = [Guarded(v.float(), 0) for v in (run.bias, run.weight)]
        counter = np.array([3])
        buffers = {"running_mean": running[0].array, "running_var": running[1].array}
        y = run.elemt(**buffers, num_batches_tracked=counter, momentum=None)
        sums, grad_weight, grad_bias = run.backward_reduce(torch.float32, dtype)
        dx = run.backward_elemt(2 * sums)
        results.append([run.stats(), y, *(r.read() for r in running), counter])
        results[-1] += [sums, grad_weight, grad_bias, dx]
    for other in results[1:]:
        for first, value in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, value)


def test_the_cases_reach_every_branch_of_the_plan(emulator):
    """What the layouts above are chosen for."""
    plans, writing = [], []
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for offsets in OFFSETS:
                run = Run(emulator, layout, dtype, offsets)
                activations = [run.place(run.x, i).array for i in range(3)]
                plans.append((layout, dtype, run.emulation.plan(activations)))
                writing.append((layout, run.emulation.plan(activations, writes=True)))
    for splits in (False, True):
        assert any(p.span > 1 and (p.splits > 1) == splits for _, p in writing), "no short rows"
        assert any(p.tiles > 1 and p.columns > c.C and p.span == 1 for c, p in writing)
        folded = [p for layout, _, p in plans if layout.channels_last and p.columns > layout.C]
        assert any((p.splits > 1) == splits for p in folded), "no folded rows"
    for channels_last in (False, True):
        mine = [plan for layout, _, plan in plans if layout.channels_last == channels_last]
        assert {plan.vec for plan in mine} == {1, 2, 4, 8}
        assert {plan.splits > 1 for plan in mine} == {False, True}
        assert {plan.threads for plan in mine} >= {32, 256}
    assert any(1 < plan.fan < plan.splits for _, _, plan in plans), "no tree of two levels"
    assert any(plan.tiles > 1 and plan.splits > 1 and plan.tile > 1 for _, _, plan in plans)
    assert any(plan.tiles * plan.tile > layout.C for layout, _, plan in plans), "no idle lane"
    streaming = emulator.Emulation(1, 1, 1000, False, l2_bytes=1024)
    assert streaming.plan([np.zeros(1000, np.float32)]).streaming
