"""What each layer does in each mode of torch: every cell of docs/modes.md, tried on two ranks.

nn.BatchNorm2d has the whole batch in one process; what is right comes from the formula.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from inputs import random
from test_docs import pytestmark, tables  # noqa: F401
from test_transforms import CHANNELS, Formula
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchs_kernels import TorchsSyncBatchNorm

from syncbn_cuda import FastSyncBatchNorm

KINDS = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "nn.SyncBatchNorm": TorchsSyncBatchNorm,
    "FastSyncBatchNorm": FastSyncBatchNorm,
}
#: What has the whole batch in one process; the last is the formula, and says what is right.
ALONE = (nn.BatchNorm2d, Formula)


def layer_of(kind):
    """Returns a layer in which nothing has the value that layers start with."""
    torch.manual_seed(3)
    layer = kind(CHANNELS).double()
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    return layer


def batch_of(kind, samples=4):
    """Returns this rank's part of a batch, or all of it for a layer that knows one process."""
    torch.manual_seed(samples)
    x = random((2 * samples, CHANNELS, 3, 2), torch.float64)
    return x if kind in ALONE else x.chunk(2)[dist.get_rank()].clone()


def together(values, kind):
    """Puts the ranks' parts of a result together."""
    if kind in ALONE:
        return values
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def total(values, kind):
    """Sums the ranks' gradients of what they share."""
    return values if kind in ALONE else together(values[None], kind).sum(0)


def joined(*results):
    return torch.cat([result.flatten().double() for result in results])


def trained(layer, x, kind, backend=None):
    """Trains for two steps, compiled with a backend if any; returns all that comes of them."""
    call = torch.compile(layer, backend=backend, fullgraph=True) if backend else layer
    results = []
    for batch in (x, x.square()):
        leaf = batch.detach().requires_grad_()
        leaves = [leaf, *layer.parameters()]
        dx, *grads = torch.autograd.grad(call(leaf).pow(3).sum(), leaves)
        results += [together(dx, kind), *(total(grad, kind) for grad in grads)]
    return joined(*results, *layer.buffers())


# Each tries a mode with a kind of layer; it returns a word, or numbers, which have to be those of
# one process with the whole batch.


def eager(kind):
    return trained(layer_of(kind), batch_of(kind), kind)


def compiled(kind):
    torch.compiler.reset()
    return trained(layer_of(kind), batch_of(kind), kind, "aot_eager")


def graphs_for_five_sizes(kind):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = layer_of(kind)
    for samples in range(3, 8):
        trained(layer, batch_of(kind, samples), kind, counter)
    return str(counter.frame_count)


class ReadsBack(Exception):
    """The host asked for a value."""


class Reads(TorchDispatchMode):
    """Raises where the host asks for a value, or for a shape that depends on one."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            raise ReadsBack(name)
        return operator(*args, **kwargs or {})


def without_host_reads(kind):
    layer, x = layer_of(kind), batch_of(kind).requires_grad_()
    with Reads():
        layer(x).pow(3).sum().backward()
    return "nothing"


def second_derivative(kind):
    layer, x = layer_of(kind), batch_of(kind).requires_grad_()
    (g,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    dx, grad_weight = torch.autograd.grad(g.pow(2).sum(), [x, layer.weight])
    return joined(together(dx, kind), total(grad_weight, kind))


def func_grad(kind):
    layer, x = layer_of(kind), batch_of(kind)
    buffers = dict(layer.named_buffers())

    def loss(x, buffers):
        return functional_call(layer, buffers, (x,)).pow(3).sum()

    return joined(together(torch.func.grad(loss)(x, buffers), kind), *buffers.values())


def forward_mode(kind):
    layer, x = layer_of(kind), batch_of(kind)
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.sin(x)))
        return together(forward_ad.unpack_dual(y).tangent, kind)


def exported_in_evaluation(kind):
    # It is torch's own layer there, which evaluates on the CPU.
    layer = layer_of(nn.SyncBatchNorm if kind is TorchsSyncBatchNorm else kind).eval()
    x = batch_of(kind)
    if kind is Formula:
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    program = torch.export.export(nn.Sequential(layer), (x,))
    targets = [node.target for node in program.graph.nodes]
    assert {t.namespace for t in targets if isinstance(t, torch._ops.OpOverload)} == {"aten"}
    return together(program.module()(x), kind)


MODES = {
    "eager": eager,
    "`torch.compile(fullgraph=True)`": compiled,
    "graphs for five batch sizes": graphs_for_five_sizes,
    "what the host reads back in a step": without_host_reads,
    "double backward": second_derivative,
    "`torch.func.grad`": func_grad,
    "forward-mode AD": forward_mode,
    "`torch.export` in evaluation": exported_in_evaluation,
}


#: Where another mode, eager, says what is right.
MEASURES = {compiled: eager}


@functools.cache
def right(attempt):
    return MEASURES.get(attempt, attempt)(Formula)


def outcome(attempt, kind):
    try:
        got = attempt(kind)
    except ReadsBack:
        return "values"
    except torch._dynamo.exc.Unsupported:
        return "graph breaks"
    except Exception as error:
        return type(error).__name__
    if isinstance(got, str):
        return got
    return "right" if torch.allclose(got, right(attempt), rtol=1e-9, atol=1e-10) else "wrong"


def outcomes_rank(rank):
    return {
        mode: [outcome(attempt, kind) for kind in KINDS.values()] for mode, attempt in MODES.items()
    }


def test_every_cell_of_the_table_is_what_comes_of_trying(run):
    first, second = run(2, outcomes_rank)
    assert first == second
    (table,) = tables("modes.md")
    names = ["mode", *(f"`{name}`" for name in KINDS)]
    assert table == [names, *([mode, *cells] for mode, cells in first.items())]
