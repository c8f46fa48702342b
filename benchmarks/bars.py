"""What is demanded of the layers, and what a run measured of it: blank where it did not."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.candidates import BOTH, FLOOR
from benchmarks.harness import Spread, geometric_mean

MB = 1e6
OURS = "ours synchronised"

Test = Callable[[dict], bool]


def nchw(row: dict) -> bool:
    return row["layout"] == "contiguous"


def bars(rows: list[dict]) -> list[tuple[str, str, str]]:
    """Returns each demand on the layers, its figure, and what was measured.

    Args:
        rows: all of the question `layers`.
    """
    graph = [r for r in rows if r.get("clock") == "graph" and r.get("cache") == "cold"]
    cpu = [r for r in rows if r.get("clock") == "wall" and r["direction"] == BOTH]
    single = [r for r in graph if r["direction"] != BOTH]
    both = [r for r in graph if r["direction"] == BOTH]
    torch = f"torch synchronised / {OURS}"
    rate = copy_rate(graph)

    def of(net: str, dtype: str, layer: str = "") -> list[dict]:
        return [
            r for r in both
            if nchw(r) and r["net"] == net and r["dtype"] == dtype and layer in r["layer"]
        ]  # fmt: skip

    def multiples(direction: str, least: float, most: float) -> list[float]:
        return [
            r["passes"] * r["pass_bytes"] / r["times_us"][OURS]["p50"] / rate
            for r in single
            if r["direction"] == direction and least * MB <= r["pass_bytes"] <= most * MB
        ]

    return [
        ("launches a layer, forward / backward, with the collective; syncs; copies to the host",
         "3 / 3; 0; 0", launches(rows)),
        ("tensors of 128 MB and more: least fraction of the bandwidth of a copy",
         ">= 0.90", least(single, f"{FLOOR} / {OURS}", lambda r: r["pass_bytes"] >= 128 * MB)),
        ("all: least max(floor, 4 us) / time", ">= 0.60", number(min(
            (max(r["passes"] * r["pass_bytes"] / rate, 4.0) / r["times_us"][OURS]["p50"]
             for r in single), default=None))),
        ("torch SyncBN / ours, forward + backward: ResNet-50 N=32 bfloat16, geometric mean",
         ">= 3", mean(of("resnet50 N=32", "bfloat16"), torch)),
        ("... U-Net 64x512^2 float32; bfloat16; 3-D 32x128^3 bfloat16", ">= 5; >= 8; >= 15",
         joined(mean(of("unet N=2", "float32", "64x512x512"), torch),
                mean(of("unet N=2", "bfloat16", "64x512x512"), torch),
                mean(of("unet3d N=2", "bfloat16", "32x128x128x128"), torch))),
        ("... channels-last, geometric mean; the least of all", ">= 1.5; >= 1.0",
         joined(mean([r for r in both if not nchw(r)], torch), least(both, torch))),
        ("L2 reuse, least multiple of the bandwidth of a copy: forward of 8-24 MB; backward of "
         "4-12 MB", ">= 1.25; >= 1.2",
         joined(number(min(multiples("forward", 8, 24), default=None)),
                number(min(multiples("backward", 4, 12), default=None)))),
        ("ours synchronised / cuDNN, geometric mean; the worst that is over 2 us slower",
         "<= 0.8; <= 1.05", joined(inverse_mean(both, f"cuDNN / {OURS}"), slowest(both))),
        ("CPU, forward + backward, torch / ours: geometric mean; the least",
         ">= 1.5; >= 1.0", joined(mean(cpu, "torch / ours"), least(cpu, "torch / ours"))),
    ]  # fmt: skip


def copy_rate(rows: list[dict]) -> float:
    """Bytes a microsecond of the largest copy; caches would lend wings to a smaller one."""
    largest = max(rows, key=lambda r: r["passes"] * r["pass_bytes"], default=None)
    if largest is None:
        return float("nan")
    return largest["passes"] * largest["pass_bytes"] / largest["times_us"][FLOOR]["p50"]


def launches(rows: list[dict]) -> str:
    """The most of all layers."""
    counts = [row["counts"][OURS] for row in rows if OURS in row.get("counts", {})]
    if not counts:
        return ""

    def most(direction: str, *what: str) -> int:
        return max(sum(each[direction][name] for name in what) for each in counts)

    def most_of_both(what: str) -> int:
        return max(most("forward", what), most("backward", what))

    launched = ("kernels", "memcpys", "memsets")
    return (
        f"{most('forward', *launched)} / {most('backward', *launched)}; "
        f"{most_of_both('syncs')}; {most_of_both('device_to_host')}"
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def joined(*values: str) -> str:
    """Values side by side, with a dash for one that is not there."""
    return "; ".join(value or "-" for value in values) if any(values) else ""


def mean(rows: list[dict], pair: str) -> str:
    ratios = [row["ratios"][pair] for row in rows if pair in row["ratios"]]
    return str(geometric_mean(ratios)) if ratios else ""


def inverse_mean(rows: list[dict], pair: str) -> str:
    ratios = [row["ratios"][pair] for row in rows if pair in row["ratios"]]
    if not ratios:
        return ""
    straight = geometric_mean(ratios)
    return str(Spread(1 / straight.p50, 1 / straight.p80, 1 / straight.p20))


def least(rows: list[dict], pair: str, wanted: Test = lambda row: True) -> str:
    """The least median, and where."""
    found = [(r["ratios"][pair]["p50"], r) for r in rows if wanted(r) and pair in r["ratios"]]
    if not found:
        return ""
    value, row = min(found, key=lambda pair: pair[0])
    return f"{value:.2f} ({row['layer']}, {row['dtype']})"


def slowest(rows: list[dict]) -> str:
    """The largest ratio of our time to cuDNN's, where that is more than the grain of a launch."""
    times = [row["times_us"] for row in rows if {OURS, "cuDNN"} <= row["times_us"].keys()]
    pairs = [(each[OURS]["p50"], each["cuDNN"]["p50"]) for each in times]
    slower = [ours / cudnn for ours, cudnn in pairs if ours > cudnn + 2]
    return f"{max(slower):.2f}" if slower else "none" if pairs else ""
