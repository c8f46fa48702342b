"""How long the layers should take on cards that are not at hand, by bytes and launches alone.

    python -m benchmarks.predict                  # the table of docs/kernels.md
    python -m benchmarks.predict --dtype float32

A prediction, not a measurement: data sheets, and three assumptions that a GPU has yet to confirm.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import shapes


@dataclass(frozen=True)
class Card:
    """From a data sheet."""

    name: str
    bandwidth: float  # bytes a second
    l2: float  # bytes


CARDS = (
    Card("H200", 4.8e12, 50 * 2**20),
    Card("H100 SXM", 3.35e12, 50 * 2**20),
    Card("A100 SXM 80 GB", 2.04e12, 40 * 2**20),
)

#: What copies reach of a data sheet's bandwidth.
COPY = 0.92
#: Of the L2, what one pass finds of the pass before it, in reverse order.
KEPT = 0.5
#: Seconds of a kernel that moves nothing: launch within a graph, first load, reduction, end.
LAUNCH = 2.5e-6

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Pass:
    """Forward or backward: two kernels that both read the same tensors."""

    name: str
    read: int  # tensors read by each of the two
    written: int = 1

    def floor(self, tensor: float, card: Card) -> float:
        """Seconds that a copy of as many bytes takes."""
        return (2 * self.read + self.written) * tensor / (COPY * card.bandwidth)

    def predicted(self, tensor: float, card: Card) -> float:
        """Seconds, without the collective."""
        kept = min(self.read * tensor, KEPT * card.l2)
        return 2 * LAUNCH + self.floor(tensor, card) - kept / (COPY * card.bandwidth)


PASSES = (Pass("forward", 1), Pass("backward", 2))


def layers() -> Iterator[tuple[str, int]]:
    """Names and numbers of values, each size once: the layout moves as many bytes."""
    sizes = {(shape.name, tuple(shape.size)) for shape in shapes.SHAPES}
    order = [(shape.name, tuple(shape.size)) for shape in shapes.SHAPES]
    for name, size in sorted(sizes, key=order.index):
        yield f"{name} {'x'.join(map(str, size))}", math.prod(size)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(size: int) -> Iterator[str]:
    """Markdown: microseconds forward / backward."""
    cards = [f"{card.name} {kind}" for card in CARDS for kind in ("floor", "predicted", "measured")]
    yield row(["layer", "MB", *cards])
    yield row(["---", *["---:"] * (len(cards) + 1)])
    for name, values in layers():
        tensor = values * size
        cells = []
        for card in CARDS:
            for times in (
                [each.floor(tensor, card) for each in PASSES],
                [each.predicted(tensor, card) for each in PASSES],
            ):
                cells.append(" / ".join(f"{1e6 * seconds:.1f}" for seconds in times))
            cells.append("")
        yield row([name, f"{tensor / 1e6:.1f}", *cells])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", choices=SIZES, default="bfloat16")
    print("\n".join(table(SIZES[parser.parse_args().dtype])))


if __name__ == "__main__":
    main()
