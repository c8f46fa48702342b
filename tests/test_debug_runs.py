"""Debug mode leaves a right run as it is, keeps the store small, and is nothing while off."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import fake_world
from test_debug import LONG, Net, batch, step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncbn_cuda import FastSyncBatchNorm, _collective, debug, set_debug


@pytest.fixture
def switched_back(monkeypatch):
    monkeypatch.setattr(_collective, "watch", None)


def keys():
    """The number of keys in the store of the world, while no rank changes it."""
    dist.barrier()
    count = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1].num_keys()
    dist.barrier()
    return count


def exchanges(group=None):
    """How many exchanges this rank has taken part in."""
    watch = sys.modules["syncbn_cuda._watch"]
    return watch._exchanges[group or dist.group.WORLD]._number


def train(net, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        step(net, batch())
    return [*(p.grad for p in net.parameters()), *net.buffers()]


def long_rank(rank):
    """The number of keys in the store before, in, and after a long run in debug mode."""
    expected = train(Net(), 100, rank)
    counts = [keys()]
    set_debug(True, LONG)
    net = Net()
    train(net, 1, rank)
    counts.append(keys())
    net.load_state_dict(Net().state_dict())
    net.zero_grad()
    actual = train(net, 100, rank)
    counts.append(keys())
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert exchanges() == 4 * 101
    set_debug(False)
    train(Net(), 5, rank)
    assert keys() == counts[-1] and exchanges() == 4 * 101
    return counts


def test_a_long_run_is_the_same_bits_and_leaves_no_keys(run):
    before, first, last = run(3, long_rank)[0]
    # Three signatures, their count and the verdict; and of each rank in which world it is.
    assert before + 5 + 3 == first == last


def off_rank(rank):
    before = keys()
    train(Net(), 3, rank)
    return keys() - before, "syncbn_cuda._watch" in sys.modules


def test_off_it_is_not_even_imported(run):
    assert run(2, off_rank) == [(0, False)] * 2


def checkpointed_rank(rank, reentrant):
    net = Net()
    model = DistributedDataParallel(net)
    inner = net.bn1
    net.bn1 = nn.Sequential(inner)
    net.forward = lambda x: net.bn2(checkpoint(net.bn1, x, use_reentrant=reentrant))
    set_debug(True, LONG)
    for _ in range(3):
        model(batch().requires_grad_()).sum().backward()
    assert inner.num_batches_tracked == 3
    return exchanges()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_no_exchange(run, reentrant):
    assert run(2, checkpointed_rank, reentrant) == [3 * 4] * 2


def mixed_rank(rank):
    """A reentrant checkpoint on one rank alone, whose first pass records no gradients."""
    net = Net()
    set_debug(True, LONG)
    for _ in range(2):
        x = batch().requires_grad_()
        y = checkpoint(net, x, use_reentrant=True) if rank else net(x)
        y.sum().backward()
    return exchanges()


def test_a_checkpoint_on_one_rank_alone_is_no_disagreement(run):
    assert run(2, mixed_rank) == [8] * 2


def derivatives_rank(rank):
    """How many exchanges a double backward has, and a derivative of torch.func."""
    net, x = FastSyncBatchNorm(2, track_running_stats=False), batch().requires_grad_()
    set_debug(True, LONG)
    (dx,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    counts = [exchanges()]
    torch.func.jvp(net, (x,), (x,))
    torch.func.grad(lambda x: net(x).square().sum())(x)
    return [*counts, exchanges() - counts[0]]


def test_derivatives_of_any_order_are_exchanged_as_well(run):
    first, second = run(2, derivatives_rank)
    # Forward, backward of two sums, the derivatives of both, and backward again by way of y; then a
    # sum and its tangent, and a sum and its gradient.
    assert first == second == [6, 4]


def compiled_rank(rank):
    net = torch.compile(Net(), fullgraph=True, backend="aot_eager")
    set_debug(True, LONG)
    before = keys()
    for _ in range(2):
        step(net, batch())
    return keys() - before


def test_what_is_compiled_is_not_exchanged(run):
    assert run(2, compiled_rank) == [0] * 2


class Peers:
    """A group of another kind, without a store."""

    def size(self):
        return 2

    def name(self):
        return "gloo"

    def allreduce(self, tensors, options):
        return None


@pytest.mark.parametrize("known", [False, True])
def test_a_group_without_a_store_is_left_alone(switched_back, monkeypatch, known):
    group = Peers()
    if known:
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("gloo", None))
    monkeypatch.setattr("syncbn_cuda.module.resolve_group", lambda held: group)
    set_debug(True, LONG)
    assert _collective.watch is not None
    layer = FastSyncBatchNorm(2)
    step(layer, batch())
    with pytest.raises(ValueError, match="expected input with 2 channels"):
        layer(batch(3))
    assert layer.num_batches_tracked == 1


class LostStore:
    """The exchanges of a group whose store is gone."""

    def step(self, owner, direction):
        return 1

    def count(self, model):
        return ""

    def forget(self):
        pass

    def tell(self, signature, timeout=None):
        raise dist.DistNetworkError("connection reset")

    meet = tell


@pytest.fixture
def lost_store(switched_back, monkeypatch):
    set_debug(True, LONG)
    monkeypatch.setattr("syncbn_cuda._watch._exchange_of", lambda group: LostStore())
    with fake_world(2):
        yield


def test_a_store_that_fails_is_named_with_the_layer(lost_store):
    begin = r"FastSyncBatchNorm debug: before the forward of FastSyncBatchNorm\(2\) the store "
    with pytest.raises(RuntimeError, match=f"{begin}.* failed.*: connection reset"):
        FastSyncBatchNorm(2)(batch())
    with pytest.raises(ValueError, match="expected input with 2 channels"):  # as it says more
        FastSyncBatchNorm(2)(batch(3))


def test_what_only_stands_for_a_tensor_is_not_exchanged(lost_store):
    with FakeTensorMode():
        assert isinstance(FastSyncBatchNorm(2)(batch()), FakeTensor)


def test_a_fake_world_is_left_alone(switched_back):
    set_debug(True, LONG)
    with fake_world(2):
        step(FastSyncBatchNorm(2), batch())


def test_alone_there_is_nobody_to_tell(switched_back):
    set_debug(True)
    layer = FastSyncBatchNorm(2)
    step(layer, batch())
    layer.eval()(batch())
    assert layer.num_batches_tracked == 1


OFF = ["0", "", "false", "False", "off", "no", None]


@pytest.mark.parametrize(
    ("value", "seconds", "timeout"),
    [(value, "7", False) for value in OFF]
    + [("1", "", None), ("1", "7.5", 7.5), ("on", None, None)],
)
def test_the_environment_switches_it_on(switched_back, monkeypatch, value, seconds, timeout):
    for name, text in ("SYNCBN_DEBUG", value), ("SYNCBN_DEBUG_TIMEOUT", seconds):
        if text is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, text)
    importlib.reload(debug)
    watch = _collective.watch
    assert (False if watch is None else watch._timeout) == timeout


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan"])
def test_the_timeout_of_the_environment_is_positive(switched_back, monkeypatch, seconds):
    monkeypatch.setenv("SYNCBN_DEBUG", "1")
    monkeypatch.setenv("SYNCBN_DEBUG_TIMEOUT", seconds)
    with pytest.raises(ValueError, match=f"SYNCBN_DEBUG_TIMEOUT: expected .*, got '{seconds}'"):
        importlib.reload(debug)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), timedelta(0)])
def test_a_timeout_is_positive(switched_back, timeout):
    with pytest.raises(ValueError, match="set_debug: expected timeout to be positive, got"):
        set_debug(True, timeout)
    assert _collective.watch is None
