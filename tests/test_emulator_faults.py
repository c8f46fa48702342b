"""The emulator finds what it is there to find: each fault, planted in a kernel of its own."""

from __future__ import annotations

import pytest
from emulator.build import load

SEEDS = range(20)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("barrier for half", r"deadlock: .*16 threads at a barrier, .*faults\.cpp:\d+"),
        ("barriers in two branches", r"divergent barrier, others wait at .*faults\.cpp:\d+"),
        ("barrier in a loop of unequal length", r"deadlock: .*32 threads at a barrier"),
        ("shuffle for half", r"deadlock: .*16 threads at a shuffle"),
        ("shuffle outside its mask", r"a shuffle from or to a lane outside its mask"),
        ("misaligned load", r"misaligned access at .*faults\.cpp:\d+ .*block \d+, thread \d+"),
        ("misaligned store", r"misaligned access at .*faults\.cpp:\d+"),
        ("partials stored plainly", r"__ldcg of what no __stcg of this kernel has stored"),
        ("partials loaded as constants", r"__ldg of what the kernel itself stores"),
        ("too much shared memory", r"more than 48 KB of shared memory"),
    ],
)
def test_a_fault_is_an_error_that_names_its_place(kernel, message):
    for seed in SEEDS:
        with pytest.raises(RuntimeError, match=message):
            load().run_kernel(kernel, seed)


def test_after_an_error_the_emulator_works():
    with pytest.raises(RuntimeError):
        load().run_kernel("barrier for half")
    assert load().run_kernel("shared memory") == 1


@pytest.mark.parametrize("threads", [0, 33, 2048])
def test_a_launch_of_a_bad_size_is_an_error(threads):
    with pytest.raises(RuntimeError, match=f"bad launch: 8 blocks of {threads} threads"):
        load().run_kernel("shared memory", threads=threads)


@pytest.mark.parametrize(
    ("kernel", "without"),
    [
        ("shared memory", "no barrier"),
        ("partials", "no fence before the counter"),
        ("partials", "no fence after the counter"),
    ],
)
def test_a_missing_barrier_or_fence_gives_a_wrong_result(kernel, without):
    assert all(load().run_kernel(kernel, seed) == 1 for seed in range(200))
    assert any(load().run_kernel(f"{kernel}, {without}", seed) != 1 for seed in range(200))
