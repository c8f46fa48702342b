"""How do the two forms of the message scale: here, and on paper to 16,384 GPUs?

Measured, over Gloo on 2 to 16 ranks of this machine's CPU: the sum over ranks of our forward
message beside torch's gathering of float32 ``[2C+1]`` of every rank, in turn (message.py), and the
latency of a step and the bandwidth that fit either best (fit.py).

Predicted, of NCCL over NVLink and InfiniBand: the share of a training step that the layers of a
ResNet-50 and a U-Net take (share.py, nccl.py). Nothing of that is measured.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import message, share
from benchmarks.fit import Fit, fit
from benchmarks.groups import ranks as launched
from benchmarks.harness import progress
from benchmarks.machine import cores
from benchmarks.message import GATHER, SUM
from benchmarks.options import Options
from benchmarks.report import as_table

RANKS = (2, 4, 8, 16)
CHANNELS = (64, 256, 1024, 2048)
QUICK_CHANNELS = (64, 2048)

MEASURED, FITTED, PREDICTED = "measured", "fitted", "predicted"
#: Where ranks share cores, a step waits for its rank's turn on one: another latency.
CORES, SHARED = "a core a rank", "more ranks than cores"


def measure(options: Options) -> list[dict]:
    """Times both forms, fits them, and predicts."""
    if launched() > 1:
        raise SystemExit("scaling: for one process, which starts ranks of its own")
    channels = list(QUICK_CHANNELS if options.quick else CHANNELS)
    groups = [ranks for ranks in RANKS if options.match in f"{ranks} ranks"]
    rows = [
        row | {"part": MEASURED, "regime": CORES if ranks <= (cores() or 1) else SHARED}
        for ranks in progress(groups, "group")
        for row in message.on_ranks(ranks, channels, options.turns)
    ]
    found = [*rows, *fits(rows), *share.rows()]
    return [row | {"question": "scaling"} for row in found]


def fits(rows: list[dict]) -> list[dict]:
    """Fits what was measured, by form and by whether each rank has a core.

    Of the times, the 20th percentile: what else the machine does disturbs it least.
    """
    found = []
    for form in (SUM, GATHER):
        for regime in dict.fromkeys(row["regime"] for row in rows):
            some = [row for row in rows if row["regime"] == regime]
            fitted = fit(
                [row["traffic"][form]["steps"] for row in some],
                [row["traffic"][form]["sent"] for row in some],
                [row["times_us"][form]["p20"] for row in some],
            )
            names = [row["name"] for row in some]
            found.append(
                {
                    "part": FITTED,
                    "form": form,
                    "regime": regime,
                    "alpha_us": fitted.alpha_us,
                    "beta_us": fitted.beta_us,
                    "residuals": dict(zip(names, fitted.residuals, strict=True)),
                }
            )
    return found


def table(rows: list[dict]) -> str:
    """Formats the rows: what was measured, what fits it, what is predicted."""
    measured, fitted, predicted = (
        [row for row in rows if row["part"] == part] for part in (MEASURED, FITTED, PREDICTED)
    )
    parts = []
    if measured:
        parts += ["### Measured: Gloo on this machine's CPU", message.table(measured)]
        parts += ["### Fitted to it", _fits(fitted), _residuals(fitted)]
    for net in dict.fromkeys(row["net"] for row in predicted):
        some = [row for row in predicted if row["net"] == net]
        parts += [f"### Predicted, not measured: {net} on H100 nodes of 8, NCCL", _added(some)]
        parts += [_slider(some)]
    return "\n\n".join(parts)


def _fits(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        found = Fit(row["alpha_us"], row["beta_us"], tuple(row["residuals"].values()))
        rate = f"{found.gigabytes_s:.3g}" if row["beta_us"] else "not told from none"
        worst = max(map(abs, found.residuals))
        cells = [f"{found.alpha_us:.0f}", rate, f"{100 * found.rms:.0f} %", f"{100 * worst:.0f} %"]
        lines.append([row["form"], row["regime"], *cells])
    header = ["", "", "alpha, us a step", "1 / beta, GB/s", "residual, rms", "largest"]
    said = (
        "alpha steps + beta bytes sent, by the ring algorithm, to the 20th percentile; residuals "
        "are relative.\n\n"
    )
    return said + as_table(header, lines, texts=2)


def _residuals(rows: list[dict]) -> str:
    forms: dict[str, dict[str, float]] = {}
    for row in rows:
        forms.setdefault(row["form"], {}).update(row["residuals"])
    lines = [
        [name, *(f"{100 * residuals[name]:+.0f} %" for residuals in forms.values())]
        for name in next(iter(forms.values()))
    ]
    return as_table(["(measured - fitted) / measured", *forms], lines)


def _added(rows: list[dict]) -> str:
    """What the layers add to a step, and what a rank holds."""
    forms = list(rows[0]["added_ms"])
    lines = []
    for row in rows:
        added = [_range(row["added_ms"][form], "{:.3g}") for form in forms]
        held = [f"{row['held'][form]:,}" for form in (share.SUM_TREE, share.TORCH)]
        lines.append([row["groups"], f"{row['gpus']:,}", *added, *held])
    header = ["groups", "GPUs", *(f"{form}, ms" for form in forms), "bytes held: sum", "gather"]
    first = rows[0]
    return (
        f"{first['layers']} layers of {first['channels']:,} channels together. What they add to a "
        "step, low to high; bytes that a rank holds of the widest layer's forward message.\n\n"
        + as_table(header, lines)
    )


def _slider(rows: list[dict]) -> str:
    """The share of steps from short to long, those that were published among them."""
    steps = {f"{ms} ms": float(ms) for ms in share.STEPS_MS}
    steps |= {f"{ms:.0f} ms ({of})": ms for of, ms in rows[0]["steps_ms"].items()}
    forms = (share.SUM_TREE, share.TORCH)
    flat = [row for row in rows if row["groups"] == share.FLAT]
    node = next(row for row in rows if row["groups"] == share.NODE)
    chosen = [(f"{row['gpus']:,}", row) for row in flat if row["gpus"] in (8, 256, 16384)]
    columns = [(f"{n} GPUs, {form}", row, form) for n, row in chosen for form in forms]
    columns.append(("node groups, any GPUs, sum, tree", node, share.SUM_TREE))
    lines = [
        [name]
        + [
            _range(
                {c: 100 * share.share(v, ms) for c, v in row["added_ms"][form].items()}, "{:.2g}"
            )
            for _, row, form in columns
        ]
        for name, ms in sorted(steps.items(), key=lambda item: item[1])
    ]
    header = ["step without it", *(name for name, _, _ in columns)]
    return "Share of the step, in percent, low to high.\n\n" + as_table(header, lines)


def _range(ends: dict[str, float], form: str) -> str:
    """Both ends, without exponents."""
    texts = [f"{float(form.format(value)):,.10g}" for value in ends.values()]
    return " - ".join(dict.fromkeys(texts))


def plots(rows: list[dict], folder: Path) -> list[Path]:
    """Draws what was measured beside its fit, and the predicted shares."""
    from benchmarks.scaling_plots import measured_and_fitted, predicted_shares

    measured, predicted = (
        [row for row in rows if row["part"] == part] for part in (MEASURED, PREDICTED)
    )
    written = []
    if measured:
        fitted = [row for row in rows if row["part"] == FITTED]
        written.append(measured_and_fitted(measured, fitted, folder))
    if predicted:
        written.append(predicted_shares(predicted, folder))
    return written
