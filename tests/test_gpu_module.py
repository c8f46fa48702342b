"""The layer in one process on a GPU: the tests of test_module.py, memory, devices, launches."""

from __future__ import annotations

import distributed
import gpu
import pytest
import torch
from gpu import on_gpu, several_gpus  # noqa: F401
from inputs import LAYOUTS, random
from test_compile import test_each_setting_is_one_graph_that_does_what_eager_does
from test_memory import test_backward_keeps_the_input_and_three_vectors  # noqa: F401
from test_module import (  # noqa: F401
    test_a_kernel_that_wrote_the_buffers_is_seen_by_autograd,
    test_all_arguments_do_what_batch_norm_does,
    test_an_empty_batch_alone,
    test_autocast_keeps_the_type_of_the_input,
    test_constant_channels_become_zero,
    test_counts_beyond_the_range_of_half,
    test_gradcheck,
    test_memory_format_is_kept,
    test_mixtures_of_types,
    test_only_what_needs_a_gradient_gets_one,
    test_runs_are_the_same_bits,
    test_training_step_is_right_in_every_layout_and_type,
    test_values_near_the_largest_half,
)
from test_operators import operator_calls
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from training import train_once

from syncbn_cuda import FastSyncBatchNorm, _library

pytestmark = gpu.MARKS


@pytest.fixture
def little_memory():
    """Returns a function that leaves this process a megabyte more than it holds."""

    def limit():
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        allowed = torch.cuda.memory_reserved() + 2**20
        torch.cuda.set_per_process_memory_fraction(allowed / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_in_forward_is_torchs_own_error(little_memory):
    layer, x = FastSyncBatchNorm(4), torch.randn(64, 4, 2**16)
    layer(x[:2])
    little_memory()
    with pytest.raises(torch.OutOfMemoryError):
        layer(x)
    assert layer.num_batches_tracked == 1, "half-updated"


def test_out_of_memory_in_backward_is_torchs_own_error(little_memory):
    layer, x = FastSyncBatchNorm(4), torch.randn(64, 4, 2**16, requires_grad=True)
    y, dy = layer(x), torch.ones_like(x)
    little_memory()
    with pytest.raises(torch.OutOfMemoryError):
        y.backward(dy)


def test_a_layer_and_its_input_on_two_devices():
    x = random((4, 3, 5))
    with pytest.raises(ValueError, match="expected weight on the input's device cpu, got cuda:0"):
        FastSyncBatchNorm(3)(x.cpu())
    layer = FastSyncBatchNorm(3)
    layer.num_batches_tracked = layer.num_batches_tracked.cpu()
    with pytest.raises(ValueError, match="num_batches_tracked to be one int64 on cuda:0"):
        layer(x)


@several_gpus
def test_another_gpu_than_the_current_one():
    assert torch.cuda.current_device() == 0
    x, dy = random((8, 6, 130, 128)), random((8, 6, 130, 128))
    first = train_once(FastSyncBatchNorm(6), x, dy)
    second = train_once(FastSyncBatchNorm(6, device="cuda:1"), x.to("cuda:1"), dy.to("cuda:1"))
    assert second[0].device == second[1].device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    for a, b in zip(first, second, strict=True):
        # The two may differ in kind, and so in the order of their sums.
        torch.testing.assert_close(a, b.to(a.device))


@several_gpus
@pytest.mark.parametrize("step", _library.STEPS[1:])  # the first takes a single tensor
def test_tensors_on_two_gpus_are_refused(compiled, step):
    good = list(operator_calls(random((4, 3, 5, 2)))[step])
    for index, argument in enumerate(good[1:], start=1):
        if isinstance(argument, torch.Tensor):
            wrong = [*good[:index], argument.to("cuda:1"), *good[index + 1 :]]
            with pytest.raises(ValueError, match=f"{step}: expected .* on the input's device"):
                getattr(compiled, step)(*wrong)


def first_compiled_rank(rank):
    """In a process of its own: no kernels have been asked for before the trace."""
    test_each_setting_is_one_graph_that_does_what_eager_does({})


def test_the_first_call_of_a_process_may_be_compiled():
    distributed.run(1, first_compiled_rank, setup=gpu.take_gpu)


def launches(call):
    """The names of all that the GPU does in a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]


def test_200_steps_keep_nothing():
    layer, x = FastSyncBatchNorm(64), random((4, 64, 130, 128)).requires_grad_()
    wanted = (x, *layer.parameters())
    held = []
    for _ in range(210):
        torch.autograd.grad(layer(x), wanted, x.detach())
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[9]


KERNELS = {
    "batch_norm_stats": "stats_kernel",
    "batch_norm_elemt": "elemt_kernel",
    "batch_norm_elemt_running": "elemt_kernel",
    "batch_norm_backward_reduce": "backward_reduce_kernel",
    "batch_norm_backward_elemt": "backward_elemt_kernel",
}


@pytest.mark.parametrize("step", _library.STEPS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_step_is_one_kernel(compiled, step, layout):
    """And no memset: the counters between blocks are zero already."""
    x = LAYOUTS[layout](random((4, 64, 130, 128)))
    arguments = operator_calls(x)[step]
    operator = getattr(compiled, step)
    operator(*arguments)
    done = launches(lambda: operator(*arguments))
    assert len(done) == 1 and KERNELS[step] in done[0] and "syncbn" in done[0], done


def test_a_training_step_is_four_kernels():
    layer, x = FastSyncBatchNorm(64), random((4, 64, 130, 128)).requires_grad_()
    dy = torch.ones_like(x)
    wanted = (x, *layer.parameters())
    torch.autograd.grad(layer(x), wanted, dy)
    done = launches(lambda: torch.autograd.grad(layer(x), wanted, dy))
    assert len(done) == 4 and all("syncbn" in name for name in done), done
