"""The launch plan on the cards and tensors it is made for; emulated cards have few multiprocessors.

What the kernels compute by such plans, tests/test_emulator.py has.
"""

from __future__ import annotations

import pytest
from emulator.build import load

MULTIPROCESSORS = 132  # of an H100 and an H200
L2_BYTES = 50 * 2**20
LAYERS = [
    *[(2, 64, 512, 512), (2, 1024, 32, 32), (2, 32, 128, 128, 128), (32, 64, 112, 112)],
    *[(32, 256, 56, 56), (32, 2048, 7, 7), (2, 2048, 7, 7), (8, 3, 224, 224), (2, 65, 317, 211)],
]
MAX_VALUES = 512  # kMaxValues
MAX_TILE = 128  # kMaxTile
PARTIAL_BYTES = 16  # of a channel in a block

sizes = pytest.mark.parametrize("size", [2, 4, 8], ids=lambda size: f"{8 * size} bit")
steps = pytest.mark.parametrize("writes", [False, True], ids=["adds up", "writes"])
layouts = pytest.mark.parametrize(
    "channels_last", [False, True], ids=["contiguous", "channels last"]
)


def planned(shape, size, channels_last=False, writes=False):
    n, c, *spatial = shape
    s = 1
    for length in spatial:
        s *= length
    card = {"sms": MULTIPROCESSORS, "l2_bytes": L2_BYTES}
    return load().Emulation(n, c, s, channels_last, **card).plan_aligned(size, writes=writes)


def test_what_layers_launch(report):
    """Blocks x threads (packs a thread), of what adds up and what writes."""
    line = "{:<20} {:<13} {:>4} | {:>17} | {:>17}"
    lines = [line.format("layer", "layout", "bits", "stats and reduce", "elemt")]
    for shape in LAYERS:
        for channels_last in (False, True):
            for size in (2, 4):
                plans = [planned(shape, size, channels_last, writes) for writes in (False, True)]
                launches = [f"{p.blocks} x {p.threads} ({p.packs})" for p in plans]
                layout = "channels-last" if channels_last else "contiguous"
                lines.append(line.format("x".join(map(str, shape)), layout, 8 * size, *launches))
    report(f"launches on {MULTIPROCESSORS} multiprocessors", "\n".join(lines))


@steps
@layouts
@sizes
@pytest.mark.parametrize("shape", [(2, 64, 512, 512), (32, 256, 56, 56), (2, 32, 128, 128, 128)])
def test_large_tensors_fill_the_card(shape, size, channels_last, writes):
    plan = planned(shape, size, channels_last, writes)
    assert plan.threads == 256
    assert plan.vec * size == 16
    assert 4 * MULTIPROCESSORS <= plan.blocks <= 16 * MULTIPROCESSORS


@pytest.mark.parametrize("channels", [64, 96, 100, 128, 300, 400, 512, 600, 1024, 1100])
def test_no_few_blocks_are_left_for_a_last_wave(channels):
    """Blocks an SM are a whole number, but for a part that does not weigh."""
    blocks = planned((8, channels, 128, 128), 2).blocks / MULTIPROCESSORS
    assert blocks / -(-blocks // 1) >= 0.85


@layouts
@sizes
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2**30 + 7), (2**12, 1, 2**20), (3, 7, 2**28 + 1), (64, 2048, 128, 128), (5, 12, 999)],
)
def test_no_thread_adds_up_more_values_than_float32_bears(shape, size, channels_last):
    plan = planned(shape, size, channels_last)
    values = (plan.packs + 1) * (1 if channels_last else plan.vec)
    assert values <= MAX_VALUES + plan.vec


@sizes
@pytest.mark.parametrize("channels", [64, 128, 256, 1000])
def test_partial_sums_are_few_beside_the_input(channels, size):
    shape = (32, channels, 112, 112)
    plan = planned(shape, size, True)
    partials = plan.blocks * plan.tile * PARTIAL_BYTES
    assert partials <= 0.04 * 32 * channels * 112 * 112 * size


@sizes
@pytest.mark.parametrize(
    "shape", [(2, 2048, 7, 7), (32, 512, 7, 7), (8, 1024, 14, 14), (64, 32, 3)]
)
def test_short_rows_are_written_by_whole_packs(shape, size):
    spatial = 1
    for length in shape[2:]:
        spatial *= length
    plan = planned(shape, size, writes=True)
    if spatial * size > 512:
        assert plan.span == 1 and plan.tile == 1
    else:
        assert (plan.columns, plan.span) == (shape[1] * spatial, spatial)
        assert (plan.tile - 2) // spatial + 2 <= MAX_TILE  # channels, wherever the first begins
    assert plan.vec * size == 16


@steps
@sizes
@pytest.mark.parametrize("channels", [1, 3, 5, 13])
def test_rows_of_few_odd_channels_are_read_by_whole_packs(channels, size, writes):
    plan = planned((8, channels, 224, 224), size, True, writes)
    assert plan.vec * size == 16
    assert plan.tiles == 1 and plan.columns == plan.vec * channels


@sizes
@pytest.mark.parametrize("channels", [37, 65, 2049])
def test_rows_of_any_odd_channels_are_written_by_whole_packs(channels, size):
    assert planned((8, channels, 30, 30), size, True, writes=True).vec * size == 16


@steps
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((2, 2048, 7, 7), 196), ((2, 512, 28, 28), 512), ((256, 2048), 64), ((64, 512), 16)],
)
def test_small_tensors_are_spread_over_the_card(shape, blocks, writes):
    """By blocks of few threads rather than by few blocks."""
    assert planned(shape, 2, len(shape) == 2, writes).blocks >= blocks
