"""The operators on a GPU: the tests of test_operators.py, and what the CPU cannot show."""

from __future__ import annotations

import gpu
import numpy as np
import pytest
import reference
import torch
from emulator.cases import LAYOUTS
from gpu import on_gpu, same  # noqa: F401
from inputs import DENSE, DTYPES, assert_close, numpy, random
from reference import split_message
from test_nonfinite import test_what_buffers_cannot_hold_moves_none_of_them  # noqa: F401
from test_operators import (  # noqa: F401
    EPS,
    message,
    operator_calls,
    test_a_large_mean_cancels_nothing,
    test_an_empty_rank,
    test_an_outlier_or_a_nan_stays_in_its_channel,
    test_backward,
    test_elemt,
    test_elemt_running,
    test_stats,
    test_when_all_ranks_are_empty_the_buffers_stay,
    test_wrong_arguments_raise_before_memory_is_touched,
    vectors,
)
from training import check_training_step

from syncbn_cuda import _library

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("uninitialized_is_nan")]


@pytest.fixture
def kernels(compiled):
    """Only the compiled operators: the others are torch's own on any device."""
    return compiled


def test_the_kernels_are_in_use(compiled):
    assert _library.kernels_for(torch.device("cuda")) is compiled, _library.build_info()
    assert random((2, 3)).is_cuda


def placed(x, layout, offset):
    """(N, C, S) in memory as the layout says, some values past a 16-byte boundary."""
    room = torch.full((x.numel() + offset,), torch.nan, dtype=x.dtype)
    room[offset:] = layout.flat(x)
    if layout.channels_last:
        return room[offset:].view(layout.N, layout.S, layout.C).transpose(1, 2)
    return room[offset:].view(layout.N, layout.C, layout.S)


#: Without those of so few values a channel that their variance may be small (inputs.ROUNDING).
ENOUGH = [layout for layout in LAYOUTS if layout.N * layout.S > 3]


@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ENOUGH, ids=lambda layout: str(tuple(layout)))
def test_the_shapes_of_the_emulator(layout, dtype, offsets):
    tensors = [random(layout[:3], dtype) for _ in offsets]
    check_training_step(*(placed(t, layout, o) for t, o in zip(tensors, offsets, strict=True)))


#: By layout and type: several blocks a channel, with a tree of two levels in channels-last.
large = pytest.mark.parametrize("shape", [(4, 6, 130, 128), (2, 64, 64, 65)], ids=str)


def all_steps(compiled, x, dy):
    """What the operators make of one batch, one after the other."""
    stats = compiled.batch_norm_stats(x)
    y = compiled.batch_norm_elemt(x, stats, None, None, EPS)
    sums = compiled.batch_norm_backward_reduce(dy, x, stats, EPS, False, True)
    return stats, y, *sums, compiled.batch_norm_backward_elemt(dy, x, stats, sums[0], None, EPS)


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@large
def test_twenty_runs_are_the_same_bits(compiled, shape, dtype, layout):
    x, dy = (DENSE[layout](random(shape, dtype)) for _ in range(2))
    first = all_steps(compiled, x, dy)
    for _ in range(19):
        assert same(all_steps(compiled, x, dy), first)


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@large
def test_many_blocks_compute_what_the_reference_does(shape, dtype, layout):
    check_training_step(DENSE[layout](random(shape, dtype)), DENSE[layout](random(shape, dtype)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("dtype", "buffers"), [(d, b) for d in DTYPES for b in {torch.float32, d}], ids=str
)
def test_cpu_and_gpu_derive_the_same_bits_from_the_same_message(compiled, dtype, buffers, momentum):
    """A group may have ranks on both, and all of them have to keep the same buffers."""
    x = random((64, 37, 9), dtype, mean=3.0, std=7.0)
    stats, running = message(x), vectors(buffers, 2, 37)
    results = []
    for device in ("cuda", "cpu"):
        mean, var = (v.to(device, copy=True) for v in running)
        counter = torch.tensor(41, device=device)
        compiled.batch_norm_elemt_running(
            *(x.to(device), stats.to(device), None, None, EPS, mean, var, counter, momentum)
        )
        results.append([mean.cpu(), var.cpu(), counter.cpu()])
    assert same(*results)
    assert not torch.equal(results[0][0], running[0].cpu())


@pytest.mark.parametrize("step", _library.STEPS[1:])  # the first takes a single tensor
def test_tensors_on_two_devices_are_refused(compiled, step):
    good = list(operator_calls(random((4, 3, 5, 2)))[step])
    where = [index for index, argument in enumerate(good) if isinstance(argument, torch.Tensor)]
    for index in where[1:]:
        wrong = [*good[:index], good[index].cpu(), *good[index + 1 :]]
        with pytest.raises(ValueError, match=f"{step}: expected .* on the input's device"):
            getattr(compiled, step)(*wrong)


def repeated(pattern, times, channels_last):
    """(N, C, P) laid out as N x C x (times * P) values, filled without a second such tensor."""
    n, c, p = pattern.shape
    if channels_last:
        x = torch.empty(n, times, p, c, dtype=pattern.dtype)
        return x.copy_(pattern.transpose(1, 2)[:, None]).view(n, times * p, c).transpose(1, 2)
    x = torch.empty(n, c, times, p, dtype=pattern.dtype)
    return x.copy_(pattern[:, :, None]).view(n, c, times * p)


def assert_repeats(x, expected):
    """Asserts that x is (N, C, P) over and over, and that near what is expected."""
    period = expected.shape[2]
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            row = x[n, c].unflatten(0, (-1, period))
            assert (row == row[:1]).all(), (n, c)
    assert_close(x[:, :, :period], expected, x.dtype)


@pytest.mark.parametrize("channels_last", [False, True])
def test_tensors_beyond_the_range_of_int32(compiled, channels_last):
    times = 2**24 + 1
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    # Small whole numbers, as rounding would not even out over so many equal values.
    pattern, slope = (random((2, 8, 8), torch.float16).mul(2).round() for _ in range(2))
    x = repeated(pattern, times, channels_last)
    assert x.numel() > 2**31
    stats = compiled.batch_norm_stats(x)
    values = np.moveaxis(numpy(pattern), 1, 0).reshape(8, -1)
    sums, squares, count = split_message(numpy(stats))
    assert count == 16 * times
    assert_close(sums / times, values.sum(1), torch.float32)
    assert_close(squares / times, (values**2).sum(1), torch.float32)
    y = compiled.batch_norm_elemt(x, stats, None, None, EPS)
    assert_repeats(y, reference.forward(numpy(pattern), eps=EPS).output)
    del y
    dy = repeated(slope, times, channels_last)
    sums, *_ = compiled.batch_norm_backward_reduce(dy, x, stats, EPS, False, False)
    dx = compiled.batch_norm_backward_elemt(dy, x, stats, sums, None, EPS)
    assert_repeats(dx, reference.backward(numpy(slope), numpy(pattern), eps=EPS).input)
