"""torch.compile: one graph in every setting, with the results of eager, alone and over ranks."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import fake_world
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from inputs import DTYPES, LAYOUTS, numpy, random
from test_distributed import assert_is_global, shards, train_layer
from test_groups import NEEDS, Net
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from training import train_once

from syncbn_cuda import FastSyncBatchNorm, _library, convert_sync_batchnorm
from syncbn_cuda.functional import sync_batch_norm

CHANNELS = 5


def whole(module, backend="aot_eager"):
    """Compiles a module, which must be one graph; nothing is compiled of its code as yet."""
    torch.compiler.reset()
    return torch.compile(module, backend=backend, fullgraph=True)


def assert_same_steps(compiled, eager, batches):
    """Trains and evaluates both on each batch: results and buffers are the same bits."""
    for x, dy in batches:
        results = []
        for call, module in ((compiled, compiled), (eager, eager)):
            module.train()
            trained = train_once(call, x, dy)
            module.eval()
            results.append([*trained, call(x), *(p.grad for p in module.parameters())])
        for a, b in itertools.zip_longest(*results):
            assert torch.equal(a, b) and a.stride() == b.stride()
        for a, b in zip(compiled.buffers(), eager.buffers(), strict=True):
            assert torch.equal(a, b)


ARGUMENTS = [
    {},
    {"momentum": None},
    {"track_running_stats": False},
    {"affine": False},
    {"bias": False, "momentum": 0.0},
    {"affine": False, "track_running_stats": False},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_each_setting_is_one_graph_that_does_what_eager_does(arguments):
    layer = FastSyncBatchNorm(CHANNELS, **arguments)
    batches = [(random((4, CHANNELS, 3, 3), mean=m), random((4, CHANNELS, 3, 3))) for m in (0, 2)]
    for training in (True, False):
        graphs = torch._dynamo.explain(copy.deepcopy(layer).train(training))(batches[0][0])
        assert (graphs.graph_count, graphs.graph_break_count) == (1, 0), graphs.break_reasons
    assert_same_steps(whole(layer), copy.deepcopy(layer), batches)
    assert layer.num_batches_tracked is None or layer.num_batches_tracked == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, CHANNELS), (3, CHANNELS, 7), (4, CHANNELS, 6, 5)], ids=str)
def test_each_layout_and_type(shape, layout):
    for dtype, parameters in itertools.product(DTYPES, (torch.float32, None)):
        if parameters is dtype:
            continue
        layer = FastSyncBatchNorm(CHANNELS, dtype=parameters or dtype)
        batch = [LAYOUTS[layout](random(shape, dtype, mean=mean)) for mean in (1, 0)]
        assert_same_steps(whole(layer), copy.deepcopy(layer), [batch])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_torch_operations_may_be_compiled_as_well(monkeypatch, dtype):
    monkeypatch.setattr(_library._available, "compiled", None)
    layer = FastSyncBatchNorm(CHANNELS, dtype=dtype)
    batch = [random((4, CHANNELS, 3), dtype, mean=mean) for mean in (1, 0)]
    assert_same_steps(whole(layer), copy.deepcopy(layer), [batch])


def block():
    torch.manual_seed(2)
    return convert_sync_batchnorm(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU()),
        )
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_block_of_layers(backend, autocast):
    eager = block()
    compiled = whole(copy.deepcopy(eager), backend)
    for layout in ("contiguous", "channels_last"):
        x = LAYOUTS[layout](random((4, 3, 9, 9)))
        for net in (eager, compiled):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                y = net(x)
            y.float().pow(2).sum().backward()
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        # The compiler rounds between operations where eager does not, and the other way round.
        close = {"rtol": 0.05, "atol": 0.05} if autocast else {}
        for a, b in zip(compiled.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(a, b, **close)
        for a, b in zip(compiled.parameters(), eager.parameters(), strict=True):
            error = (a.grad - b.grad).norm() / b.grad.norm().clamp(min=1)
            assert error < (0.05 if autocast else 1e-4)


@pytest.mark.parametrize("dim", [0, 3], ids=["batch", "width"])
@pytest.mark.parametrize("arguments", ARGUMENTS[:3], ids=str)
def test_sizes_may_change_without_compiling_each(arguments, dim):
    layer = FastSyncBatchNorm(CHANNELS, **arguments)
    counter = CompileCounterWithBackend("aot_eager")
    shapes = [[4, CHANNELS, 6, 5] for _ in range(6)]
    for size, shape in enumerate(shapes, 3):
        shape[dim] = size
    batches = [(random(shape), random(shape)) for shape in shapes]
    compiled, eager = whole(layer, counter), copy.deepcopy(layer)
    for x, dy in batches:
        for a, b in zip(train_once(compiled, x, dy), train_once(eager, x, dy), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2  # of one size, then of any


def ddp_of_compiled(net, backend):
    return DistributedDataParallel(whole(net, backend))


def compiled_ddp(net, backend):
    torch.compiler.reset()
    # Not as one graph: DistributedDataParallel does what the compiler cannot follow.
    return torch.compile(DistributedDataParallel(net), backend=backend)


#: Samples of two ranks in each step, 5 in all. (Inductor fails at a convolution of no samples.)
SPLITS = {
    "aot_eager": [(3, 2), (1, 4), (2, 3), (5, 0), (4, 1)],
    "inductor": [(3, 2), (1, 4), (2, 3)],
}


def steps_of(net, optimizer, batches):
    """Trains on the loss of a global batch of 5 samples; returns all that was learnt."""
    for x, scale in batches:
        optimizer.zero_grad()
        (net(x).pow(3).sum() * (scale / 5)).backward()
        optimizer.step()
    return {k: numpy(v) for k, v in net.state_dict().items()}


def ddp_rank(rank, order, backend, batches):
    net = convert_sync_batchnorm(Net().double())
    own = [(x.split(counts)[rank], 2) for x, counts in zip(batches, SPLITS[backend], strict=True)]
    # DistributedDataParallel averages what is a sum over samples.
    return steps_of(order(net, backend), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), own)


@pytest.mark.parametrize("order", [ddp_of_compiled, compiled_ddp])
@pytest.mark.parametrize("backend", SPLITS)
def test_ddp_in_both_orders_is_one_process(run, backend, order):
    batches = [torch.randn(5, 3, 8, 8, dtype=torch.float64) for _ in SPLITS[backend]]
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    expected = steps_of(net, optimizer, [(x, 1) for x in batches])
    for state in run(2, ddp_rank, order, backend, batches):
        for name, actual in state.items():
            plain = name.removeprefix("module.").removeprefix("_orig_mod.").removeprefix("module.")
            np.testing.assert_allclose(actual, expected[plain], rtol=1e-8, atol=1e-10, err_msg=name)


#: Each of four ranks is in two groups of one size.
SINGLES, ROWS, COLUMNS = [[r] for r in range(4)], ([0, 1], [2, 3]), ([0, 2], [1, 3])


def own_group(rank, groups):
    """Makes the groups of some ranks, as every rank has to; returns this rank's own."""
    return [made for made, ranks in [(dist.new_group(g), g) for g in groups] if rank in ranks][0]


def group_rank(rank, pieces):
    """Trains a compiled layer, and calls a compiled function, in several groups in turn."""
    single, row, column = (own_group(rank, groups) for groups in (SINGLES, ROWS, COLUMNS))
    layer = FastSyncBatchNorm(CHANNELS)
    layer.compile(backend="aot_eager", fullgraph=True)
    steps = []
    for group in (single, row, column, None, row):
        layer.process_group = group
        layer.zero_grad()
        layer.reset_running_stats()
        steps.append(train_layer(layer, *pieces[rank]))
    call = whole(
        lambda x, group: sync_batch_norm(x, None, None, training=True, process_group=group)
    )
    x = pieces[rank][0]
    return steps, [numpy(call(x, group)) for group in (single, row, column, None)]


def test_a_compiled_layer_talks_to_the_group_it_has(run):
    pieces = shards((2, 3, 1, 4), tail=(4,))
    answers = run(4, group_rank, pieces)
    for index, groups in enumerate((SINGLES, ROWS, COLUMNS, [range(4)], ROWS)):
        for group in groups:
            ranks = [answers[rank][0][index] for rank in group]
            assert_is_global(ranks, [pieces[rank] for rank in group], torch.float32)
    for steps, outputs in answers:
        for step, output in zip(steps, outputs, strict=False):
            np.testing.assert_array_equal(output, step["y"])


def counting_sums(counts):
    """A compiler that appends how many sums over ranks each graph has."""

    def compile_(graph, _):
        counts.append(sum("all_reduce" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph)

    return compile_


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
@torch.no_grad()
def test_code_for_a_group_is_not_that_for_another_of_its_name(sizes):
    """Groups of worlds that come one after the other may share a name, and differ in size."""
    layer, counts = FastSyncBatchNorm(CHANNELS), []
    compiled = whole(layer, aot_autograd(fw_compiler=counting_sums(counts)))
    for size in sizes:
        with fake_world(size):
            layer.process_group = dist.group.WORLD
            compiled(random((4, CHANNELS)))
    assert counts == [size - 1 for size in sizes]


def all_reduces(needs):
    """Counts them in the forward and the backward graph of a compiled layer in a world of two."""
    counts = []
    layer, x = FastSyncBatchNorm(CHANNELS), random((4, CHANNELS))
    for leaf, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        leaf.requires_grad_(needed)
    backend = aot_autograd(
        fw_compiler=counting_sums(counts), partition_fn=min_cut_rematerialization_partition
    )
    whole(layer, backend)(x).sum().backward()
    return counts


class Twins(nn.Module):
    """Two layers of one input, whose steps a compiler might take for one, and a layer of both."""

    def __init__(self):
        super().__init__()
        self.twins = nn.ModuleList(FastSyncBatchNorm(CHANNELS) for _ in range(2))
        self.last = FastSyncBatchNorm(CHANNELS)
        self.last.weight.requires_grad_(False)

    def forward(self, x):
        first, second = self.twins
        return self.last(first(x).relu() * second(x))


def gradients_of(needs, rank, backend):
    """Trains a net on a rank's input; returns the gradients. Without a backend it runs eagerly."""
    torch.manual_seed(0)
    net, x = Twins(), random((3, CHANNELS, 4))[rank:]
    for twin in net.twins:
        for leaf, needed in zip((x, twin.weight, twin.bias), needs, strict=True):
            leaf.requires_grad_(needed)
    (whole(net, backend) if backend else net)(x).pow(3).sum().backward()
    return [leaf.grad for leaf in (x, *net.parameters()) if leaf.requires_grad]


def beside_eager_rank(rank, backend):
    for needs in NEEDS:
        eager = gradients_of(needs, rank, None)
        mixed = gradients_of(needs, rank, backend if rank == 1 else None)
        torch.testing.assert_close(mixed, eager)
    return [all_reduces(needs) for needs in NEEDS]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_rank_beside_an_eager_one(run, backend):
    """Its backward has its collective, whatever needs a gradient, or its peer would wait."""
    for counts in run(2, beside_eager_rank, backend):
        assert counts == [[1, 1]] * len(NEEDS)
