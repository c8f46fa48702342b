"""The CUDA code path end to end without a GPU: checks, allocation, dispatch, plan and kernels.

The tests of the operators, of the layer and of several ranks run once more, with the CUDA operators
that the emulator offers for CPU tensors.
"""

from __future__ import annotations

import functools

import distributed
import pytest
from emulator import operators
from emulator.build import load
from inputs import random
from test_compile import test_each_setting_is_one_graph_that_does_what_eager_does  # noqa: F401
from test_derivatives import test_derivatives_of_three_orders_over_ranks  # noqa: F401
from test_distributed import (  # noqa: F401
    test_image_sizes_may_differ_between_ranks,
    test_one_value_a_channel_in_the_whole_group_raises_on_every_rank,
    test_ranks_are_one_batch,
    test_ranks_are_one_batch_in_every_type,
    test_when_every_rank_is_empty,
)
from test_module import (  # noqa: F401
    test_all_arguments_do_what_batch_norm_does,
    test_an_empty_batch_alone,
    test_gradcheck,
    test_memory_format_is_kept,
    test_mixtures_of_types,
    test_only_what_needs_a_gradient_gets_one,
    test_runs_are_the_same_bits,
    test_training_step_is_right_in_every_layout_and_type,
)
from test_nonfinite import test_what_buffers_cannot_hold_moves_none_of_them  # noqa: F401
from test_operators import (  # noqa: F401
    test_a_large_mean_cancels_nothing,
    test_an_empty_rank,
    test_an_outlier_or_a_nan_stays_in_its_channel,
    test_backward,
    test_elemt,
    test_elemt_running,
    test_opcheck,
    test_stats,
    test_when_all_ranks_are_empty_the_buffers_stay,
    test_wrong_arguments_raise_before_memory_is_touched,
)

from syncbn_cuda import FastSyncBatchNorm, _library

pytestmark = pytest.mark.usefixtures("uninitialized_is_nan")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(_library._available, "compiled", operators.kernels())


@pytest.fixture
def kernels():
    return operators.kernels()


@pytest.fixture
def run():
    return functools.partial(distributed.run, setup=operators.use)


def launches_rank(rank):
    load().events()
    FastSyncBatchNorm(3)(random((4, 3, 5)).requires_grad_()).sum().backward()
    return load().events()


def test_a_training_step_is_four_launches(run):
    assert launches_rank(0) == ["launch"] * 4
    assert run(2, launches_rank) == [["launch"] * 4] * 2
