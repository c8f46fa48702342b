"""What each layer does in each mode of torch: every cell of docs/modes.md, tried on two ranks.

nn.BatchNorm2d has the whole batch in one process, and is the measure of what is right.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from inputs import random
from test_docs import pytestmark, tables  # noqa: F401
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torchs_kernels import TorchsSyncBatchNorm

from syncbn_cuda import FastSyncBatchNorm

KINDS = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "nn.SyncBatchNorm": TorchsSyncBatchNorm,
    "FastSyncBatchNorm": FastSyncBatchNorm,
}
CHANNELS = 3


def layer_of(kind, **arguments):
    return kind(CHANNELS, **arguments).double()


def batch_of(kind, samples=4):
    """Returns this rank's part of a batch, or all of it for a layer that knows one process."""
    torch.manual_seed(samples)
    x = random((2 * samples, CHANNELS, 3, 2), torch.float64)
    return x if kind is nn.BatchNorm2d else x.chunk(2)[dist.get_rank()]


def together(values, kind):
    """Puts the ranks' parts of a result together."""
    if kind is nn.BatchNorm2d:
        return values
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def slope(layer, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x).pow(3).sum(), x)[0]


# Each tries a mode with a kind of layer; it returns a word, or a result that has to be that of
# nn.BatchNorm2d, of all ranks.


def eager(kind):
    return together(slope(layer_of(kind), batch_of(kind)), kind)


def compiled(kind, **arguments):
    torch.compiler.reset()
    layer = torch.compile(layer_of(kind, **arguments), backend="aot_eager", fullgraph=True)
    return together(slope(layer, batch_of(kind)), kind)


def compiled_without_momentum(kind):
    return compiled(kind, momentum=None)


def graphs_for_five_sizes(kind):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(layer_of(kind), backend=counter, fullgraph=True)
    for samples in range(3, 8):
        slope(layer, batch_of(kind, samples))
    return str(counter.frame_count)


class Reads(TorchDispatchMode):
    """Raises where the host asks for a value, or for a shape that depends on one."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            raise EOFError("a value is read back")
        return operator(*args, **kwargs or {})


def without_host_reads(kind):
    layer, x = layer_of(kind), batch_of(kind)
    with Reads():
        slope(layer, x)
    return "nothing"


def second_derivative(kind):
    layer, x = layer_of(kind), batch_of(kind).requires_grad_()
    (g,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    return together(torch.autograd.grad(g.pow(2).sum(), x)[0], kind)


def func_grad(kind):
    layer, x = layer_of(kind), batch_of(kind)
    buffers = dict(layer.named_buffers())

    def loss(x, buffers):
        return functional_call(layer, buffers, (x,)).pow(3).sum()

    return together(torch.func.grad(loss)(x, buffers), kind)


def forward_mode(kind):
    layer, x = layer_of(kind), batch_of(kind)
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.sin(x)))
        return together(forward_ad.unpack_dual(y).tangent, kind)


def exported_in_evaluation(kind):
    layer, x = layer_of(kind).eval(), batch_of(kind)
    program = torch.export.export(nn.Sequential(layer), (x,))
    targets = [node.target for node in program.graph.nodes]
    assert {t.namespace for t in targets if isinstance(t, torch._ops.OpOverload)} == {"aten"}
    return together(program.module()(x), kind)


MODES = {
    "eager": eager,
    "`torch.compile(fullgraph=True)`": compiled,
    "the same with `momentum=None`": compiled_without_momentum,
    "graphs for five batch sizes": graphs_for_five_sizes,
    "CUDA graph: what the host reads back": without_host_reads,
    "double backward": second_derivative,
    "`torch.func.grad`": func_grad,
    "forward-mode AD": forward_mode,
    "`torch.export` in evaluation": exported_in_evaluation,
}


#: Where what is right is another mode's result.
MEASURES = {compiled: eager, compiled_without_momentum: eager}


def outcome(attempt, kind):
    try:
        got = attempt(kind)
    except EOFError:
        return "values"
    except torch._dynamo.exc.TorchDynamoException:
        return "graph breaks"
    except Exception as error:
        return type(error).__name__
    if isinstance(got, str):
        return got
    right = MEASURES.get(attempt, attempt)(nn.BatchNorm2d)
    return "right" if torch.allclose(got, right, rtol=1e-9) else "wrong"


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
