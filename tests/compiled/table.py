"""What each instance of a kernel takes of a multiprocessor, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiled.sass import Kernel

THREADS = 256  # kMaxThreads of plan.h
WARPS = THREADS // 32


@dataclass(frozen=True)
class Multiprocessor:
    """What there is of it, and in which units that is given out.

    The former is of the table "Technical Specifications per Compute Capability" in the CUDA C++
    Programming Guide, the latter of cuda_occupancy.h in the toolkit.
    """

    threads: int
    blocks: int
    shared: int  # bytes
    shared_unit: int
    shared_reserved: int  # bytes of each block that the system takes

    # The same from 7.5 to 10.0: four partitions with registers of their own.
    partitions = 4
    registers = 64 * 1024
    registers_unit = 256  # a warp

    def occupancy(self, registers: int, shared: int) -> float:
        """The part of its threads that blocks of THREADS can be."""
        return self.resident(registers, shared) * THREADS / self.threads

    def resident(self, registers: int, shared: int) -> int:
        """The blocks of THREADS that fit."""
        a_warp = _round_up(registers * 32, self.registers_unit)
        warps = self.registers // self.partitions // a_warp * self.partitions
        a_block = _round_up(shared + self.shared_reserved, self.shared_unit) or 1
        return min(self.blocks, self.threads // THREADS, warps // WARPS, self.shared // a_block)


MULTIPROCESSORS = {
    "7.5": Multiprocessor(1024, 16, 64 * 1024, 256, 0),
    "8.0": Multiprocessor(2048, 32, 164 * 1024, 128, 1024),
    "9.0": Multiprocessor(2048, 32, 228 * 1024, 128, 1024),
    "10.0": Multiprocessor(2048, 32, 228 * 1024, 128, 1024),
}


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


_HEAD = "{:<15} {:<13} {:<8} {:>3} {:>4} {:>2}"
_GROUP = "{:>3} {:>5} {:>4} {:>3} {:>3}"
_LEGEND = f"""\
load: the widest in the loop over the elements, in bits; n: such loads in flight in a thread;
reg: registers a thread; smem: bytes of shared memory a block; occ: occupancy by blocks of
{THREADS} threads; KB: in flight on a multiprocessor; ins: instructions of the loop a load"""


def table(kernels: Mapping[str, Sequence[Kernel]]) -> str:
    """One line an instance, one group of columns an architecture (compute capability)."""
    by_arch = {arch: {str(kernel): kernel for kernel in kernels[arch]} for arch in kernels}
    instances = sorted(
        next(iter(kernels.values())), key=lambda k: (k.name, k.layout, k.scalar, k.vec)
    )
    columns = _HEAD.format("kernel", "layout", "scalar", "vec", "load", "n")
    return "\n".join(
        [
            _LEGEND,
            _line(" " * len(columns), [f"sm_{arch.replace('.', '')}" for arch in kernels]),
            _line(columns, [_GROUP.format("reg", "smem", "occ", "KB", "ins")] * len(kernels)),
            *(_row({a: by_arch[a][str(kernel)] for a in by_arch}) for kernel in instances),
        ]
    )


def _row(instance: Mapping[str, Kernel]) -> str:
    kernel, *_ = instance.values()
    loads = sorted({8 * max(k.accesses.get("load", [0])) for k in instance.values()})
    name, bits = kernel.name.removesuffix("_kernel"), "/".join(map(str, loads))
    packs = min(k.packs for k in instance.values())
    head = _HEAD.format(name, kernel.layout, kernel.scalar, kernel.vec, bits, packs)
    return _line(head, [_group(MULTIPROCESSORS[arch], k) for arch, k in instance.items()])


def _group(multiprocessor: Multiprocessor, kernel: Kernel) -> str:
    occupancy = multiprocessor.occupancy(kernel.registers, kernel.shared)
    blocks = multiprocessor.resident(kernel.registers, kernel.shared)
    in_flight = blocks * THREADS * kernel.packs * kernel.pack / 1024
    resources = (kernel.registers, kernel.shared, f"{occupancy:.0%}")
    return _GROUP.format(*resources, f"{in_flight:.0f}", f"{kernel.issued:.0f}")


def _line(head: str, groups: Sequence[str]) -> str:
    return " | ".join([head, *(f"{group:<22}" for group in groups)]).rstrip()
