"""The CUDA kernels without a GPU: each launcher, run by the emulator, against the reference.

Tensors lie between guards of NaN and start at every misalignment asked for, outputs start as NaN,
and small emulated cards force each way of splitting a channel over blocks.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
from emulator.build import load
from inputs import DTYPES, assert_close, numpy, random

EPS = 1e-5
GUARD = 64


@pytest.fixture(scope="module")
def emulator():
    return load()


class Layout(NamedTuple):
    """(N, C, S) in memory as [N, C, S] or [N, S, C], on a card of some multiprocessors."""

    N: int
    C: int
    S: int
    channels_last: bool = False
    sms: int = 1

    def flat(self, x):
        """Lays out (N, C, S) in memory."""
        return (x.transpose(1, 2) if self.channels_last else x).reshape(-1)

    def unflat(self, x):
        shape = (self.N, self.S, self.C) if self.channels_last else (self.N, self.C, self.S)
        x = x.reshape(shape)
        return x.transpose(0, 2, 1) if self.channels_last else x


# Rows shorter than a pack, shorter than a warp's, aligned and not, over several blocks (one level
# of reduction); more threads than packs; no pack that lies inside the tensor.
CONTIGUOUS = [
    Layout(1, 1, 1),
    Layout(2, 3, 2),
    Layout(3, 7, 5),
    Layout(5, 4, 9),
    Layout(4, 16, 49),
    Layout(1, 65, 45),
    Layout(2, 3, 64),
    Layout(2, 3, 1023, sms=2),
    Layout(2, 1, 4096, sms=4),
]
# C narrower than a lane, odd, at widths that 1, 2, 4 and 8 divide, beyond one tile; rows over
# several blocks with one level of reduction and with two.
CHANNELS_LAST = [
    Layout(1, 1, 1, True),
    Layout(5, 3, 1, True),
    Layout(64, 1, 1, True),
    Layout(2, 6, 7, True),
    Layout(3, 20, 9, True, sms=4),
    Layout(4, 65, 3, True),
    Layout(2, 136, 9, True),
    Layout(3, 264, 1, True, sms=4),
    Layout(2, 64, 300, True, sms=4),
    Layout(1, 128, 1100, True, sms=4),
]
LAYOUTS = CONTIGUOUS + CHANNELS_LAST
EMPTY = [Layout(0, 5, 3), Layout(2, 5, 0, True)]


def to_numpy(x):
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def to_torch(x):
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


class Guarded:
    """A flat array between guards of NaN, some elements past a 16-byte boundary."""

    def __init__(self, values, offset):
        values = to_numpy(values.clone())
        self.room = to_numpy(torch.full((len(values) + 3 * GUARD,), torch.nan, dtype=torch.float64))
        self.room = to_numpy(to_torch(self.room).to(to_torch(values).dtype))
        size = self.room.itemsize
        self.begin = GUARD + offset + -(self.room.ctypes.data // size) % (16 // size)
        self.end = self.begin + len(values)
        self.array = self.room[self.begin : self.end]
        assert self.array.ctypes.data % 16 == offset * size % 16 or not len(values)
        self.array[:] = values

    def read(self):
        """The values in float64, once the guards are found untouched."""
        outside = np.concatenate([self.room[: self.begin], self.room[self.end :]])
        assert to_torch(outside).isnan().all(), "written outside the tensor"
        return numpy(to_torch(self.array))


class Run:
    """One batch on the emulator: activations of one type and layout, a global batch of twice it."""

    def __init__(self, emulator, layout, dtype, offsets=(0, 0, 0), seed=None, mean=0.0, **options):
        torch.manual_seed(0)
        if seed is None:  # one of its own for each case
            seed = zlib.crc32(repr((layout, dtype, offsets)).encode())
        options.setdefault("l2_bytes", seed % 2 << 20)  # all stores stream, or none
        self.layout, self.dtype, self.offsets = layout, dtype, offsets
        self.emulation = emulator.Emulation(*layout[:4], sms=layout.sms, seed=seed, **options)
        shape = layout[:3]
        self.x, self.other = random(shape, dtype, mean), random(shape, dtype, mean + 1)
        self.dy, self.other_dy = random(shape, dtype), random(shape, dtype)
        both = np.concatenate([numpy(self.x), numpy(self.other)])
        values = np.moveaxis(both, 1, 0).reshape(layout.C, -1)
        self.message = np.array([*values.sum(1), *(values**2).sum(1), values.shape[1]])
        self.weight = torch.rand(layout.C, dtype=torch.float64).add(0.5)
        self.bias = torch.randn(layout.C, dtype=torch.float64)

    def place(self, tensor, which):
        return Guarded(self.layout.flat(tensor), self.offsets[which])

    def nan(self, length):
        return Guarded(torch.full((length,), torch.nan, dtype=torch.float64), 0)

    def stats(self):
        stats = self.nan(2 * self.layout.C + 1)
        self.emulation.stats(self.place(self.x, 0).array, stats.array)
        return stats.read()

    def elemt(self, weight=None, bias=None, **running):
        output = self.place(torch.full_like(self.x, torch.nan), 1)
        self.emulation.elemt(
            self.place(self.x, 0).array, output.array, self.message, EPS, weight, bias, **running
        )
        return self.layout.unflat(output.read())

    def backward_reduce(self, weight_dtype=None, bias_dtype=None):
        sums = self.nan(2 * self.layout.C)
        gradients = [
            None
            if dtype is None
            else Guarded(torch.full((self.layout.C,), torch.nan, dtype=dtype), 1)
            for dtype in (weight_dtype, bias_dtype)
        ]
        self.emulation.backward_reduce(
            self.place(self.dy, 0).array,
            self.place(self.x, 1).array,
            self.message,
            EPS,
            sums.array,
            *(None if gradient is None else gradient.array for gradient in gradients),
        )
        return sums.read(), *(None if g is None else g.read() for g in gradients)

    def backward_elemt(self, sums, weight=None):
        grad_input = self.place(torch.full_like(self.x, torch.nan), 2)
        self.emulation.backward_elemt(
            self.place(self.dy, 0).array,
            self.place(self.x, 1).array,
            grad_input.array,
            self.message,
            sums,
            EPS,
            weight,
        )
        return self.layout.unflat(grad_input.read())


def rounding(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# Aligned; misaligned alike (for contiguous rows still full packs); not alike (single values).
OFFSETS = [(0, 0, 0), (1, 1, 1), (1, 0, 3)]

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
    assert_close(stats[: layout.C], values.sum(1), rounding(dtype), 32, scale=largest)
    assert_close(stats[layout.C : -1], (values**2).sum(1), rounding(dtype), 32)
    assert stats[-1] == layout.N * layout.S


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
@pytest.mark.parametrize("layout", [CONTIGUOUS[4], CHANNELS_LAST[6], *EMPTY], ids=str)
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
    # The message loses about 2^-52 mean^2 of the variance.
    lost = 2.0**-52 * 1e10 * float(np.abs(expected).max())
    assert np.abs(run.elemt() - expected).max() <= lost + 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layout", [Layout(4, 5, 99), Layout(4, 5, 99, True)], ids=str)
def test_an_outlier_or_a_nan_stays_in_its_channel(emulator, layout):
    run = Run(emulator, layout, torch.float32)
    clean = run.stats()
    run.x[0, 1, 0], run.x[0, 2, 0], run.x[1, 3, 2] = 1e15, torch.nan, torch.inf
    run.message = stats = run.stats()
    for c in (0, 4, 5, 9):
        assert stats[c] == clean[c]
    expected = reference.forward(numpy(run.x[:, 1:2]), eps=EPS).output
    assert_close(run.elemt()[:, 1:2], expected, torch.float32)
    assert np.isnan(stats[7]) and not np.isfinite(stats[8])


@pytest.mark.parametrize("layout", [CONTIGUOUS[7], CHANNELS_LAST[8], CHANNELS_LAST[9]], ids=str)
def test_every_schedule_gives_the_same_bits(emulator, layout):
    results = []
    for seed, blocks_alive in ((1, 1), (2, 3), (3, 8), (3, 8)):
        run = Run(emulator, layout, torch.float16, seed=seed, blocks_alive=blocks_alive)
        results.append(np.concatenate([run.stats(), run.backward_reduce()[0], run.elemt().ravel()]))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_the_cases_reach_every_branch_of_the_plan(emulator):
    """What the layouts above are chosen for."""
    plans = []
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for offsets in OFFSETS:
                run = Run(emulator, layout, dtype, offsets)
                activations = [run.place(run.x, i).array for i in range(3)]
                plans.append((layout, dtype, run.emulation.plan(activations)))
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
