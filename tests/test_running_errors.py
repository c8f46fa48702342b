"""recompute_running_stats: what goes wrong on one rank is an error on all, and nothing changes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from test_running_recompute import check, expected, loaders, marks, model, running
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncbn_cuda import convert_sync_batchnorm, recompute_running_stats


class Raising:
    """Batches, and then an error; or a batch that no forward takes."""

    def __init__(self, batches, where):
        self.batches, self.where = batches, where

    def __iter__(self):
        if self.where == "start":
            raise OSError("no such folder")
        yield from self.batches[:1]
        if self.where == "loader":
            raise OSError("a broken file")
        yield self.batches[0][:, :2] if self.where == "forward" else self.batches[1]


def raising_rank(rank, batches, where, kind):
    net = model()
    if kind == "converted":
        convert_sync_batchnorm(net)
    net.eval()
    before, values = marks(net), running(net)
    loader = Raising(batches[rank], where) if rank == 1 else batches[rank]
    with pytest.raises(Exception) as caught:
        recompute_running_stats(net, loader)
    assert marks(net) == before
    check(running(net), values)
    recompute_running_stats(net, batches[rank])  # nothing is left of the first attempt
    return type(caught.value), str(caught.value), running(net)


@pytest.mark.parametrize(
    ("where", "kind", "error", "text"),
    [
        ("start", "converted", OSError, "no such folder"),
        ("loader", "converted", OSError, "a broken file"),
        ("forward", "plain", ValueError, "BatchNorm1d(3): expected input with 3 channels in dim"),
    ],
)
def test_an_error_on_one_rank_is_one_on_all_and_undoes_the_pass(run, where, kind, error, text):
    batches = loaders((3, 2, 0))
    right = expected(batches, [[0], [1]] if kind == "plain" else [[0, 1]])
    for rank, (cls, message, values) in enumerate(run(3, raising_rank, batches, where, kind)):
        assert cls is (error if rank == 1 else RuntimeError) and text in message
        if rank != 1:
            named = f"recompute_running_stats: rank 1 raised {error.__name__}: "
            assert message.startswith(named)
        check(values, right)


def refused_rank(rank, case):
    net, batches, arguments = model(), loaders((1, 1))[rank], {}
    if case == "none":
        batches = []
    elif case == "model" and rank == 1:
        net[0] = nn.BatchNorm1d(7)
    elif case == "lazy" and rank == 1:
        net[1] = nn.LazyConv1d(4, 1)
    elif case == "group":
        pair, own = dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True)
        arguments["process_group"] = (pair, own)[rank]
    elif case == "number":
        arguments["num_batches"] = rank
    elif case == "sharded":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        batches = batches * (1 + rank)
    values = {} if case == "lazy" else running(net)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        recompute_running_stats(net, batches, **arguments)
    if values:
        check(running(net), values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "expected a batch or more, the loader gave none on any of the ranks [0, 1]"),
        ("model", "expected the same batch norms on every rank, got '0' of 3 channels with a "),
        ("lazy", "expected '1' to know its shapes, got LazyConv1d: run one batch through the mod"),
        ("group", "expected process_group to be the same on all its ranks, got ranks [0, 1] on"),
        ("number", "expected num_batches of 1 or more, got 0"),
        ("sharded", "expected as many batches on every rank, as the model is sharded (FSDP)"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(run, case, text):
    for answer in run(2, refused_rank, case):
        assert answer.startswith("recompute_running_stats: ") and text in answer
