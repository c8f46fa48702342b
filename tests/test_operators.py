"""Each operator against the float64 reference: every type, layout and odd shape."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from inputs import DENSE, DTYPES, SHAPES, assert_close, numpy, random, unit_message
from reference import split_message

from syncbn_cuda import _composite, _library

EPS = 1e-5

pytestmark = pytest.mark.usefixtures("uninitialized_is_nan")


@pytest.fixture(params=["compiled", "composite"])
def kernels(request, compiled):
    return compiled if request.param == "compiled" else _composite


def vectors(dtype, count, channels):
    return [torch.rand(channels, dtype=torch.float64).add(0.5).to(dtype) for _ in range(count)]


def message(*batches):
    """What the ranks that hold these batches would agree on."""
    return sum(_composite.batch_norm_stats(x) for x in batches)


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stats(kernels, shape, dtype, layout):
    x = DENSE[layout](random(shape, dtype))
    stats = kernels.batch_norm_stats(x)
    assert stats.dtype == torch.float64 and stats.shape == (4 * shape[1] + 1,)
    values = np.moveaxis(numpy(x), 1, 0).reshape(shape[1], -1)
    sums, squares, count = split_message(numpy(stats))
    assert count == values.shape[1]
    rounding = torch.float64 if dtype == torch.float64 else torch.float32
    largest = float(np.abs(values).sum(1).max())
    assert_close(sums, values.sum(1), rounding, 32, scale=largest)
    assert_close(squares, (values**2).sum(1), rounding, 32)


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elemt(kernels, shape, dtype, layout):
    x, other = DENSE[layout](random(shape, dtype)), random(shape, dtype, mean=1.0)
    expected = reference.forward(np.concatenate([numpy(x), numpy(other)]), eps=EPS)
    for parameters in (torch.float32, dtype):
        weight, bias = vectors(parameters, 2, shape[1])
        spread = [numpy(v).reshape(1, -1, *[1] * (x.dim() - 2)) for v in (weight, bias)]
        y = kernels.batch_norm_elemt(x, message(x, other), weight, bias, EPS)
        assert y.dtype == dtype and y.stride() == x.stride()
        assert_close(y, expected.output[: len(x)] * spread[0] + spread[1], dtype)
    y = kernels.batch_norm_elemt(x, message(x, other), None, None, EPS)
    assert_close(y, expected.output[: len(x)], dtype)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("dtype", "buffers"),
    [(d, b) for d in DTYPES for b in dict.fromkeys((torch.float32, d))],
    ids=str,
)
def test_elemt_running(kernels, dtype, buffers, momentum):
    x = random((4, 6, 5, 3), dtype)
    running_mean, running_var = vectors(buffers, 2, 6)
    before = numpy(running_mean), numpy(running_var)
    counter = torch.tensor(3)
    stats = message(x)
    y = kernels.batch_norm_elemt_running(
        x, stats, None, None, EPS, running_mean, running_var, counter, momentum
    )
    assert torch.equal(y, kernels.batch_norm_elemt(x, stats, None, None, EPS))
    factor = 0.25 if momentum is None else momentum
    expected = reference.running(*before, reference.forward(numpy(x)), factor)
    for running, value in zip((running_mean, running_var), expected, strict=True):
        assert_close(running, value, buffers, ulps=2)
    assert counter == 4


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(kernels, shape, dtype, layout):
    x, other = DENSE[layout](random(shape, dtype)), random(shape, dtype, mean=1.0)
    dy, other_dy = DENSE[layout](random(shape, dtype)), random(shape, dtype)
    (weight,) = vectors(torch.float32, 1, shape[1])
    stats = message(x, other)
    both = [np.concatenate([numpy(a), numpy(b)]) for a, b in ((dy, other_dy), (x, other))]
    expected = reference.backward(*both, numpy(weight), EPS)

    sums, grad_weight, grad_bias = kernels.batch_norm_backward_reduce(
        dy, x, stats, EPS, False, True
    )
    other_sums, other_grad_weight, other_grad_bias = kernels.batch_norm_backward_reduce(
        other_dy, other, stats, EPS, False, True
    )
    rounding = torch.float64 if dtype == torch.float64 else torch.float32
    total = sums + other_sums
    largest = float(np.abs(both).prod(0).sum() / shape[1] + np.abs(both[0]).sum() / shape[1])
    assert_close(total[: shape[1]], expected.sum_dy, rounding, scale=largest)
    assert_close(total[shape[1] :], expected.sum_dy_xmu, rounding, scale=largest)
    assert grad_weight.dtype == torch.float32 and grad_bias.dtype == dtype
    assert_close(grad_weight + other_grad_weight, expected.weight, torch.float32, scale=largest)
    assert_close(grad_bias.double() + other_grad_bias.double(), expected.bias, dtype, scale=largest)

    dx = kernels.batch_norm_backward_elemt(dy, x, stats, total, weight, EPS)
    assert dx.dtype == dtype and dx.stride() == x.stride()
    assert_close(dx, expected.input[: len(x)], dtype)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 20, 11, 11),  # planes of few values
        (40, 3, 7, 7),  # the same of many n, and rows of several n with a rest
        (3, 2100),  # more channels than a tile
        (520, 65),  # more rows than are added up in float32
        (1, 2, 200, 200),  # pieces of a plane
    ],
    ids=str,
)
def test_each_way_to_walk_a_tensor(compiled, shape, dtype, layout):
    for step in (test_stats, test_elemt, test_backward):
        step(compiled, shape, dtype, layout)


def test_an_output_of_several_megabytes(compiled):
    x = random((2, 8, 380, 380))
    y = compiled.batch_norm_elemt(x, message(x), None, None, EPS)
    assert_close(y, reference.forward(numpy(x), eps=EPS).output, torch.float32)


@pytest.mark.parametrize("shape", [(1, 4, 16384), (512, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_types_are_read_and_rounded_as_by_torch(compiled, dtype, shape):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(shape)  # every value
    channels = shape[1]
    stats = unit_message(channels)
    for factor in (1.0, 1.5, 0.7):  # exact; half of them ties; any
        weight, bias = torch.full((channels,), factor), torch.zeros(channels)
        y = compiled.batch_norm_elemt(x, stats, weight, bias, 0.0)
        expected = (x.float() * factor + 0.0).to(dtype)
        assert torch.equal(y.isnan(), expected.isnan())
        number = ~expected.isnan()
        assert torch.equal(y[number].view(torch.int16), expected[number].view(torch.int16))


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 3, 3), (4, 4, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_rank(kernels, shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    assert torch.equal(kernels.batch_norm_stats(x), torch.zeros(17, dtype=torch.float64))
    peers = message(random((3, 4, 5), dtype))
    running = [torch.zeros(4), torch.ones(4), torch.tensor(0)]
    y = kernels.batch_norm_elemt_running(x, peers, None, None, EPS, *running, 0.1)
    assert y.shape == x.shape and running[2] == 1 and (running[1] != 1).all()
    sums, grad_weight, grad_bias = kernels.batch_norm_backward_reduce(
        x, x, peers, EPS, False, False
    )
    for result, length in ((sums, 8), (grad_weight, 4), (grad_bias, 4)):
        assert torch.equal(result, torch.zeros(length, dtype=result.dtype))
    assert kernels.batch_norm_backward_elemt(x, x, peers, sums, None, EPS).shape == x.shape


def test_when_all_ranks_are_empty_the_buffers_stay(kernels):
    x = torch.empty(0, 4, 3)
    running = [torch.full((4,), 2.0), torch.full((4,), 3.0), torch.tensor(7)]
    stats = kernels.batch_norm_stats(x)
    kernels.batch_norm_elemt_running(x, stats, None, None, EPS, *running, 0.1)
    assert (running[0] == 2).all() and (running[1] == 3).all() and running[2] == 7
    sums, grad_weight, _ = kernels.batch_norm_backward_reduce(x, x, stats, EPS, False, True)
    assert not sums.any() and not grad_weight.any()


@pytest.mark.parametrize("count", [1, 195])
def test_no_variance_is_left_negative(kernels, count):
    """Each channel is one value, large enough for what rounding leaves of its square to show."""
    x = torch.linspace(1e6, 1e7, 64, dtype=torch.float64).repeat(count, 1)
    mean, var = torch.zeros(2, 64)
    y = kernels.batch_norm_elemt_running(
        x, kernels.batch_norm_stats(x), None, None, EPS, mean, var, None, 1.0
    )
    assert (var >= 0).all() and (y.abs() < 1e-3).all()


@pytest.mark.parametrize("ratio", [1e1, 1e3, 1e5])
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_large_mean_cancels_nothing(compiled, dtype, layout, ratio):
    x = DENSE[layout](random((4, 5, 33, 31), dtype, mean=ratio))
    y = compiled.batch_norm_elemt(x, compiled.batch_norm_stats(x), None, None, EPS)
    expected = reference.forward(numpy(x), eps=EPS).output
    assert np.abs(numpy(y) - expected).max() <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layout", DENSE)
def test_an_outlier_or_a_nan_stays_in_its_channel(compiled, layout):
    x = random((4, 5, 33, 31))
    clean = compiled.batch_norm_stats(DENSE[layout](x))
    x[0, 1, 0, 0], x[0, 2, 0, 0], x[1, 3, 2, 2] = 1e15, torch.nan, torch.inf
    stats = compiled.batch_norm_stats(DENSE[layout](x))
    untouched = torch.tensor([0, 4])
    for offset in (0, 5, 10, 15):
        assert torch.equal(stats[offset + untouched], clean[offset + untouched])
    # The outlier is the channel's first value, and so a pivot. It is 64 std away from the mean.
    expected = reference.forward(numpy(x[:, 1:2]), eps=EPS).output
    y = compiled.batch_norm_elemt(DENSE[layout](x), stats, None, None, EPS)
    assert_close(y[:, 1:2], expected, torch.float32)
    assert stats[7].isnan() and not stats[8].isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", DENSE)
def test_any_number_of_threads_gives_the_same_bits(compiled, dtype, layout):
    x = DENSE[layout](random((8, 24, 33, 31), dtype))
    dy = DENSE[layout](random((8, 24, 33, 31), dtype))
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        stats = compiled.batch_norm_stats(x)
        results.append((stats, *compiled.batch_norm_backward_reduce(dy, x, stats, EPS, True, True)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def operator_calls(x):
    dy, (weight, bias) = torch.ones_like(x), vectors(torch.float32, 2, x.shape[1])
    running = [torch.zeros(x.shape[1]), torch.ones(x.shape[1])]
    stats = message(x)
    sums = torch.zeros(2 * x.shape[1], dtype=torch.float64)
    return {
        "batch_norm_stats": (x,),
        "batch_norm_elemt": (x, stats, weight, None, EPS),
        "batch_norm_elemt_running": (
            *(x, stats, weight, bias, EPS, *running),
            *(torch.tensor(0), None),
        ),
        "batch_norm_backward_reduce": (dy, x, stats, EPS, False, True),
        "batch_norm_backward_elemt": (dy, x, stats, sums, weight, EPS),
    }


def other_calls(x):
    """As operator_calls, with what that leaves out given and what it gives left out."""
    dy, (weight, bias, mean, var) = torch.ones_like(x), vectors(x.dtype, 4, x.shape[1])
    stats = message(x)
    sums = torch.zeros(2 * x.shape[1], dtype=torch.float64)
    return {
        "batch_norm_stats": (x, weight, bias, mean, var, torch.tensor(0)),
        "batch_norm_elemt": (x, stats, None, bias, EPS),
        "batch_norm_elemt_running": (x, stats, None, None, EPS, mean, var, None, 0.1),
        "batch_norm_backward_reduce": (dy, x, stats, EPS, True, False),
        "batch_norm_backward_elemt": (dy, x, stats, sums, None, EPS),
    }


@pytest.mark.parametrize("step", _library.STEPS)
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(compiled, step, layout, dtype):
    """Schema, fake kernel and compiled graphs, of these shapes and of any."""
    for shape in ((4, 3, 5, 2), (4, 3), (0, 3, 4), (2, 3, 2, 2, 2)):
        for calls in (operator_calls, other_calls):
            x = DENSE[layout](random(shape, dtype))
            torch.library.opcheck(getattr(compiled, step), calls(x)[step])


@pytest.mark.parametrize("step", _library.STEPS)
def test_wrong_arguments_raise_before_memory_is_touched(compiled, step):
    x = random((4, 3, 5, 2))
    good = list(operator_calls(x)[step])
    getattr(compiled, step)(*good)
    position = next(index for index, argument in enumerate(good) if argument is x)
    for wrong, message in (
        (x[:, :, ::2], "contiguous or channels-last"),
        (x[0, 0, 0], "at least 2 dimensions"),
        (x.long(), "float32, float64, float16 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"{step}: expected .*{message}"):
            getattr(compiled, step)(*good[:position], wrong, *good[position + 1 :])
    for index, argument in enumerate(good):
        if isinstance(argument, torch.Tensor) and argument.dim() == 1:
            others = (argument[:-1], argument.long(), argument.repeat(2)[::2], argument.to("meta"))
            for wrong in others:
                with pytest.raises(ValueError, match=f"{step}: expected"):
                    getattr(compiled, step)(*good[:index], wrong, *good[index + 1 :])
