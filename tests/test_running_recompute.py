"""recompute_running_stats: the statistics of all data of all ranks, whoever has how much of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inputs import assert_close, numpy, random
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn

from syncbn_cuda import convert_sync_batchnorm, recompute_running_stats, sync_groups


class Twice(nn.Module):
    """Calls one layer twice in a forward, the second time by keyword."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(input=2 * self.norm(x).relu() + 1)


def model(dtype=torch.float64):
    torch.manual_seed(3)
    shared = nn.BatchNorm1d(4, momentum=None)
    return nn.Sequential(
        *(nn.BatchNorm1d(3), nn.Conv1d(3, 4, 1), shared, nn.Conv1d(4, 4, 1), shared),
        *(nn.BatchNorm1d(4, track_running_stats=False), nn.Conv1d(4, 4, 1), Twice()),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ).to(dtype)


def norms(net):
    return {
        n: m
        for n, m in net.named_modules()
        if isinstance(m, _BatchNorm) and m.running_var is not None
    }


def running(net):
    return {n: (numpy(m.running_mean), numpy(m.running_var)) for n, m in norms(net).items()}


def marks(net):
    """All that a pass over the data must leave as it was."""
    batch_norms = norms(net).values()
    kept = {
        n: numpy(b)
        for n, b in net.named_buffers()
        if not any(b is m.running_mean or b is m.running_var for m in batch_norms)
    }
    modules = list(net.modules())
    return (
        {n: b.tobytes() for n, b in kept.items()},
        [id(b) for b in net.buffers()],
        [(m.training, len(m._forward_pre_hooks), len(m._forward_hooks)) for m in modules],
        [(m.momentum, vars(m).get("_group", "none")) for m in batch_norms],
        len(dist.distributed_c10d._world.pg_map),
    )


def loaders(counts):
    """Batches of different sizes for each rank, some as tensors and some with labels."""
    torch.manual_seed(7)
    return [
        [random((2 + (rank + i) % 3, 3, 6), torch.float64) + rank for i in range(count)]
        for rank, count in enumerate(counts)
    ]


def expected(batches, parts, net=None):
    """The statistics in one process: ranks of a part normalise their batches of a step together."""
    net = model() if net is None else net
    seen = {name: [] for name in norms(net)}
    for name, layer in norms(net).items():
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, name=name: seen[name].append(
                numpy(args[0] if args else kwargs["input"])
            ),
            with_kwargs=True,
        )
    for step in range(max(map(len, batches))):
        for part in parts:
            together = [batches[rank][step] for rank in part if step < len(batches[rank])]
            if together:
                net(torch.cat(together))
    values = {
        n: np.concatenate([x.swapaxes(0, 1).reshape(x.shape[1], -1) for x in inputs], 1)
        for n, inputs in seen.items()
    }
    return {n: (v.mean(1), v.var(1, ddof=1)) for n, v in values.items()}


def check(got, right, dtype=torch.float64):
    assert got.keys() == right.keys()
    for name in right:
        for ours, theirs in zip(got[name], right[name], strict=True):
            # Layers behind others are as far off as what comes to them.
            assert_close(ours, theirs, dtype, ulps=32)


def recomputed_rank(rank, batches, kind, training):
    net = model()
    if kind != "alone":
        convert_sync_batchnorm(net, sync_groups(2) if kind == "pairs" else None)
    wrapped = DistributedDataParallel(net) if training else net
    net.train(training)
    before = marks(net)
    loader = [batch if i % 2 else (batch, "label") for i, batch in enumerate(batches[rank])]
    assert recompute_running_stats(wrapped, loader) is None
    assert marks(net) == before
    return running(net)


PARTS = {
    "alone": [[0], [1], [2], [3]],
    "pairs": [[0, 1], [2, 3]],
    "world": [[0, 1, 2, 3]],
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", PARTS)
def test_statistics_are_those_of_all_batches_of_all_ranks(run, kind, training):
    batches = loaders((3, 0, 1, 2))
    right = expected(batches, PARTS[kind])
    ranks = run(4, recomputed_rank, batches, kind, training)
    for got in ranks:
        check(got, right)
    first = [[v.tobytes() for pair in got.values() for v in pair] for got in ranks]
    assert first == [first[0]] * 4, "not the same bits"


def pooled_rank(rank, batches):
    net = model()
    recompute_running_stats(net, batches[rank], process_group=sync_groups(2), num_batches=2)
    return running(net)


def test_ranks_of_a_group_count_together_and_batches_may_be_few(run):
    batches = loaders((1, 3, 0, 2))
    ranks = run(4, pooled_rank, batches)
    for pair in ((0, 1), (2, 3)):
        right = expected([batches[rank][:2] for rank in pair], PARTS["alone"][:2])
        for rank in pair:
            check(ranks[rank], right)


class Asking(nn.SyncBatchNorm):
    """torch's own, which runs on GPUs alone: here it only asks who is there."""

    def forward(self, input):
        present = torch.ones(1)
        dist.all_reduce(present, group=self.process_group)
        self.seen = [*getattr(self, "seen", []), int(present)]
        return input


def asking_rank(rank, counts):
    group = sync_groups(2)
    net = nn.Sequential(Asking(3), Asking(3, process_group=group)).eval()
    recompute_running_stats(net, [torch.ones(2, 3)] * counts[rank])
    assert net[0].process_group is None and net[1].process_group is group
    return [getattr(layer, "seen", []) for layer in net]


def test_layers_of_torch_synchronise_over_the_ranks_with_a_batch(run):
    counts = (3, 0, 1, 2)
    for rank, seen in enumerate(run(4, asking_rank, counts)):
        parts = (range(4), range(rank // 2 * 2, rank // 2 * 2 + 2))
        for layer, part in zip(seen, parts, strict=True):
            left = [sum(counts[peer] > step for peer in part) for step in range(counts[rank])]
            assert layer == left


def sharded_rank(rank, batches):
    net = convert_sync_batchnorm(model())
    fully_shard(net[7])
    recompute_running_stats(fully_shard(net), batches[rank])
    return running(net)


def test_a_sharded_model_works_with_equal_loaders(run):
    batches = loaders((2, 2))
    for got in run(2, sharded_rank, batches):
        check(got, expected(batches, [[0, 1]]))


def averaged_rank(rank, batches):
    average = AveragedModel(convert_sync_batchnorm(model()))
    update_bn(batches[rank], average)
    return running(average.module)


def test_update_bn_over_ranks_is_that_of_one_process_with_their_batches_together(run):
    torch.manual_seed(7)
    batches = [[random((4, 3, 6), torch.float64) + rank for _ in range(3)] for rank in range(2)]
    alone = model()
    update_bn([torch.cat(pair) for pair in zip(*batches, strict=True)], alone)
    for got in run(2, averaged_rank, batches):
        check(got, running(alone))
