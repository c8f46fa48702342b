"""Cases for the kernel emulator: layouts, arrays between guards, and one batch run step by step."""

from __future__ import annotations

import mmap
import zlib
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from emulator.build import load
from inputs import numpy, random
from reference import message

EPS = 1e-5
GUARD = 64
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13


class Layout(NamedTuple):
    """(N, C, S) in memory as [N, C, S] or [N, S, C], on a card of some multiprocessors."""

    N: int
    C: int
    S: int
    channels_last: bool = False
    sms: int = 1

    @property
    def rows(self):
        return self.N * self.S if self.channels_last else self.N

    def flat(self, x):
        """Lays out (N, C, S) in memory."""
        return (x.transpose(1, 2) if self.channels_last else x).reshape(-1)

    def unflat(self, x):
        shape = (self.N, self.S, self.C) if self.channels_last else (self.N, self.C, self.S)
        x = x.reshape(shape)
        return x.transpose(0, 2, 1) if self.channels_last else x


# Rows shorter than a pack, shorter than a warp's, aligned and not, over several blocks (one level
# of reduction); more threads than packs; no pack that lies inside the tensor. Short rows that are
# written as columns: of one block, and of several.
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
    Layout(8, 16, 25),
    Layout(300, 24, 3, sms=4),
]
# C narrower than a lane, odd, at widths that 1, 2, 4 and 8 divide, beyond one tile; rows over
# several blocks with one level of reduction and with two; rows that are folded where C is odd, for
# all steps and, beyond one tile, for those that write.
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
    Layout(8, 5, 150, True, sms=4),
    Layout(8, 37, 3, True),
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
        load().guard(self.room, self.begin, self.end, True)

    def read(self):
        """The values in float64, once the guards are found untouched."""
        load().guard(self.room, self.begin, self.end, False)
        outside = np.concatenate([self.room[: self.begin], self.room[self.end :]])
        assert to_torch(outside).isnan().all(), "written outside the tensor"
        return numpy(to_torch(self.array))


class Sparse:
    """A flat array whose rows lie far apart, in memory that exists only where it is touched."""

    def __init__(self, values, rows, stride):
        values = to_numpy(values.clone()).reshape(rows, -1)
        size = ((rows - 1) * stride + values.shape[1]) * values.itemsize
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self.array = np.frombuffer(memory, values.dtype)
        self.stride, self.length = stride, values.shape[1]
        for begin, row in zip(range(0, size, stride), values, strict=False):
            self.array[begin : begin + self.length] = row

    def read(self):
        """The values in float64, once what is near the rows is found untouched."""
        rows = []
        for begin in range(0, len(self.array), self.stride):
            end = begin + self.length
            assert not self.array[max(begin - GUARD, 0) : begin].any(), "written before a row"
            assert not self.array[end : end + GUARD].any(), "written past a row"
            rows.append(self.array[begin:end])
        return numpy(to_torch(np.concatenate(rows)))


class Run:
    """One batch on the emulator: activations of one type and layout, a global batch of twice it."""

    schedules: ClassVar[dict[tuple, set[tuple]]] = {}  # of each case, those that its kernels ran in

    def __init__(
        self,
        emulator,
        layout,
        dtype,
        offsets=(0, 0, 0),
        seed=None,
        mean=0.0,
        row_stride=0,
        **options,
    ):
        torch.manual_seed(0)
        if seed is None:  # one of its own for each case
            seed = zlib.crc32(repr((layout, dtype, offsets)).encode())
        options.setdefault("l2_bytes", seed % 2 << 20)  # all stores stream, or none
        self.layout, self.dtype, self.offsets, self.row_stride = layout, dtype, offsets, row_stride
        self.schedule = (seed, options.get("blocks_alive"))
        self.emulation = emulator.Emulation(
            *layout[:4], sms=layout.sms, seed=seed, row_stride=row_stride, **options
        )
        shape = layout[:3]
        self.x, self.other = random(shape, dtype, mean), random(shape, dtype, mean + 1)
        self.dy, self.other_dy = random(shape, dtype), random(shape, dtype)
        both = np.concatenate([numpy(self.x), numpy(self.other)])
        values = np.moveaxis(both, 1, 0).reshape(layout.C, -1)
        self.message = message(values)
        self.weight = torch.rand(layout.C, dtype=torch.float64).add(0.5)
        self.bias = torch.randn(layout.C, dtype=torch.float64)

    def note(self, step):
        case = (self.layout, self.dtype, self.offsets, self.row_stride)
        self.schedules.setdefault(case, set()).add((step, *self.schedule))

    def place(self, tensor, which):
        values = self.layout.flat(tensor)
        if self.row_stride:
            return Sparse(values, self.layout.rows, self.row_stride)
        return Guarded(values, self.offsets[which])

    def nan(self, length):
        return Guarded(torch.full((length,), torch.nan, dtype=torch.float64), 0)

    def stats(self):
        self.note("stats")
        stats = self.nan(4 * self.layout.C + 1)
        self.emulation.stats(self.place(self.x, 0).array, stats.array)
        return stats.read()

    def elemt(self, weight=None, bias=None, **running):
        self.note("elemt")
        output = self.place(torch.full_like(self.x, torch.nan), 1)
        self.emulation.elemt(
            self.place(self.x, 0).array, output.array, self.message, EPS, weight, bias, **running
        )
        return self.layout.unflat(output.read())

    def backward_reduce(self, weight_dtype=None, bias_dtype=None):
        self.note("backward_reduce")
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
        self.note("backward_elemt")
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
