"""The health check knows which ranks share the data, from how the model is wrapped."""

from __future__ import annotations

from test_verify_layers import converted, net
from test_verify_loader import NONE, Squares, loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from syncbn_cuda import sync_groups, verify


def shared_rank(rank):
    """Two ranks hold one copy of the model; DDP's group says so, and those two share the data."""
    group = sync_groups(2)
    model = DistributedDataParallel(converted(net(), group), process_group=group)
    right = DistributedSampler(Squares(), 2, rank % 2)
    wrong = DistributedSampler(Squares(), 4, rank)
    return [verify(model, loader(sampler)).findings for sampler in (right, wrong)]


def test_the_ranks_of_ddp_share_the_data(run):
    first, *others = run(4, shared_rank)
    assert others == [first] * 3
    silent, ((problem, _, ranks, _),) = first
    assert silent == [] and "num_replicas=4, where 2 share" in problem and ranks == (0, 1, 2, 3)


def sharded_rank(rank):
    """Sharded over the world each rank has data of its own; otherwise it cannot be told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    loaders = [loader(DistributedSampler(Squares(), 4, rank)), loader()]
    models = {
        "over the world": fully_shard(converted(net())),
        "over a part": fully_shard(converted(net(), mesh["data"]), mesh=mesh["data"]),
        "twice": fully_shard(converted(net()), mesh=mesh),
        "by tensors": parallelize_module(
            nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (4,)), {"0": ColwiseParallel()}
        ),
    }
    return {
        name: [[finding.problem for finding in verify(model, each).findings] for each in loaders]
        for name, model in models.items()
    }


def test_who_shares_the_data_of_sharded_models(run):
    first, *others = run(4, sharded_rank)
    assert others == [first] * 3
    silent, (problem,) = first.pop("over the world")
    assert silent == [] and NONE in problem
    assert set(map(str, first.values())) == {"[[], []]"}
