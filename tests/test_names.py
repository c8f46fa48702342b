"""A collective that fails names its layer by its place in the model, and what it was for."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm, _collective
from syncbn_cuda._names import outermost, qualified_name, shown_ranks
from syncbn_cuda._place import running_place, searched_place
from syncbn_cuda.functional import sync_batch_norm


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = FastSyncBatchNorm(2)

    def forward(self, x):
        return self.bn(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(self.stem(x))


def test_a_layer_has_the_longest_path_that_leads_to_it():
    net = Net()
    layer = net.blocks[1].bn
    assert qualified_name(layer) == "blocks.1.bn"
    outer = nn.ModuleDict({"net": net, "again": net.blocks})
    assert qualified_name(layer) == "net.blocks.1.bn"
    del outer
    assert qualified_name(layer) == "blocks.1.bn"
    alone = FastSyncBatchNorm(2)
    assert qualified_name(alone) == ""
    assert outermost(alone) is alone and outermost(layer) is net


def test_of_paths_as_long_it_is_the_first_in_the_alphabet():
    layer = FastSyncBatchNorm(2)
    one = nn.ModuleDict({"b": layer, "a": layer})
    other = nn.ModuleDict({"c": layer})
    assert qualified_name(layer) == "a" and one["b"] is other["c"]


def test_a_module_that_leads_to_itself_ends_the_search():
    net = Net()
    net.blocks[0].outer = net
    assert qualified_name(net.blocks[0].bn) == "blocks.0.bn"


def test_shared_containers_take_no_longer_than_others():
    layer = model = FastSyncBatchNorm(2)
    for _ in range(40):  # 2 ** 40 paths
        model = nn.ModuleDict({"a": model, "b": nn.Sequential(model)})
    assert qualified_name(layer) == ".".join(["b", "0"] * 40)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_looks_like_a_module_and_wrappers_do_not_count():
    class Proxy:
        @property
        def __class__(self):
            raise AssertionError("woken")

    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    proxies = [Proxy(), nn.Module.__new__(nn.Module), scripted]
    net = Net()
    compiled = torch.compile(nn.DataParallel(net), backend="eager")
    assert qualified_name(net.blocks[0].bn) == "blocks.0.bn"
    assert compiled is not None and len(proxies) == 3
    named = nn.ModuleDict({"module": net})
    assert qualified_name(named["module"].blocks[0].bn) == "module.blocks.0.bn"


class Asked(FastSyncBatchNorm):
    """Keeps where it was in the model that ran."""

    def forward(self, x):
        place = running_place(self)
        self.place = None if place is None else (type(place.model), place.name, place.number)
        return x


def asking():
    net = Net()
    for block in net.blocks:
        block.bn = Asked(2)
    return net, net.blocks[1].bn


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = [held]  # leads to it in no other way
        self.early = Asked(2)
        self.late = held

    def forward(self, x):
        return self.held[0](x)

    def other_method(self, x):
        return self(x)


def test_a_layer_is_where_the_model_that_runs_has_it():
    net, layer = asking()
    kept = nn.ModuleDict({"copy": copy.deepcopy(net), "net": net, "part": net.blocks})
    x, of_net = torch.randn(4, 2), (Net, "blocks.1.bn", "2 of 2")
    for call in (net, net.forward, nn.DataParallel(net), torch.compile(net, backend="eager")):
        torch.compiler.set_stance("force_eager")(call)(x)
        assert layer.place == of_net
    for method in ("__call__", "forward", "other_method"):
        getattr(Holder(net), method)(x)
        assert layer.place == (Holder, "late.blocks.1.bn", "3 of 3")
    layer(x)
    assert layer.place is None
    Holder(nn.Module()).held.append(layer)
    assert searched_place(layer)[1:] == ("net.blocks.1.bn", "4 of 4") and kept


def test_without_a_model_a_layer_is_its_own():
    layer = FastSyncBatchNorm(2)
    assert searched_place(layer) == (layer, "", "1 of 1")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 2, 3, 5, 6, 7], "ranks 0, 2, 3, 5-7"),
    ],
)
def test_ranks_are_shown_in_short(ranks, text):
    assert shown_ranks(ranks) == text


def in_forward(model, x, leave):
    leave()
    model(x)


def in_backward(model, x, leave):
    y = model(x).sum()
    leave()
    y.backward()


def in_double_backward(model, x, leave):
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    leave()
    dx.sum().backward()


def in_forward_mode(model, x, leave):
    leave()
    torch.func.jvp(model, (x,), (x,))


def bare(group):
    return FastSyncBatchNorm(2, process_group=group)


def deep(group):
    net = Net()
    for layer in (net.blocks[0].bn, net.blocks[1].bn):
        layer.process_group = group
    return net


def wrapped(group):
    return DistributedDataParallel(deep(group), process_group=group, broadcast_buffers=False)


def function(group):
    return lambda x: sync_batch_norm(x, None, None, training=True, process_group=group)


LAST, BARE = r"FastSyncBatchNorm\(2\) at 'blocks.1.bn'", r"FastSyncBatchNorm\(2\)"
FIRST = LAST.replace("1", "0")
CASES = {
    "forward": (in_forward, deep, FIRST, "forward"),
    "backward": (in_backward, deep, LAST, "backward"),
    "backward under DDP": (in_backward, wrapped, LAST, "backward"),
    "of no model": (in_backward, bare, BARE, "backward"),
    "function": (in_backward, function, "sync_batch_norm of 2 channels", "backward"),
    "double backward": (in_double_backward, bare, BARE, "derivative of its backward with create_"),
    "forward mode": (in_forward_mode, bare, BARE, "forward"),
}


def deserted_rank(rank, way, make):
    """What the ranks of a group hear whose last one leaves."""
    world = dist.get_world_size()
    group = dist.new_group(list(range(1, world)), timeout=timedelta(seconds=2))
    if rank == 0:
        return ""
    model, x = make(group), torch.randn(4, 2, requires_grad=True)

    def leave():
        if rank == world - 1:
            raise InterruptedError

    try:
        way(model, x, leave)
    except InterruptedError:
        return ""
    except RuntimeError as error:
        assert type(error) is type(error.__cause__) and str(error).endswith(str(error.__cause__))
        return str(error)
    raise AssertionError("nobody missed the last rank")


@pytest.mark.parametrize("case", CASES)
def test_a_failed_collective_names_layer_direction_and_group(run, case):
    way, make, name, direction = CASES[case]
    texts = run(3, deserted_rank, way, make)
    begin = rf"{name}: the all_reduce of its {direction}.* over ranks 1, 2 \(.*gloo.*\) failed: ."
    assert re.match(begin, texts[1]), texts[1]


class Lost(RuntimeError):
    def __init__(self, code, text):
        super().__init__(code, text)


class Peers:
    """A group whose collectives fail, once they are not the first."""

    def __init__(self, error, after=0):
        self.error, self.left = error, after

    def size(self):
        return 2

    def name(self):
        return "fake"

    def allreduce(self, tensors, options):
        self.left -= 1
        if self.left < 0:
            raise self.error


def peers(monkeypatch, *args):
    group = Peers(*args)
    monkeypatch.setattr(_collective, "resolve_group", lambda held: group)
    monkeypatch.setattr("syncbn_cuda.module.resolve_group", lambda held: group)
    return group


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (dist.DistBackendError("unplugged"), dist.DistBackendError),
        (torch.OutOfMemoryError("unplugged"), torch.OutOfMemoryError),
        (Lost(7, "unplugged"), RuntimeError),
    ],
)
def test_the_type_stays_where_it_takes_a_text(monkeypatch, error, kind):
    peers(monkeypatch, error)
    layer = FastSyncBatchNorm(2)
    with pytest.raises(RuntimeError, match=r"\(2\): .* over 2 ranks \(Peers\) .*unplug") as caught:
        layer(torch.randn(4, 2))
    assert type(caught.value) is kind and caught.value.__cause__ is error
    assert layer.num_batches_tracked == 0


def test_a_graph_keeps_no_layer_alive_and_fails_without_it_too(monkeypatch):
    peers(monkeypatch, RuntimeError("unplugged"), 1)
    layer = FastSyncBatchNorm(2)
    alive = weakref.ref(layer)
    y = layer(torch.randn(4, 2))
    gc.disable()
    try:
        del layer
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="sync_batch_norm of 2 channels: .* backward over"):
        y.sum().backward()
