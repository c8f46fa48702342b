"""A model under FSDP2 is one process with the global batch; a mesh stands for its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import reference
import torch
from inputs import ROUNDING, assert_close, numpy, random
from test_groups import Net, train_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from training import train_once

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

NAMES = ("replicated", "sharded")


def blocks(net):
    return [net.features, net.head]


def layer_and_head(net):
    return [net.features[1], net.head]


@dataclass(frozen=True)
class Sharding:
    """What is sharded besides the whole net, over which mesh, and when it is converted."""

    modules: Callable[[nn.Module], list[nn.Module]] = blocks
    mesh: tuple[int, ...] = (2,)
    options: dict = field(default_factory=dict)
    convert_first: bool = True

    def apply(self, net):
        """Shards a net and converts it."""
        if self.convert_first:
            convert_sync_batchnorm(net)
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=NAMES[-len(self.mesh) :])
        for module in (*self.modules(net), net):
            fully_shard(module, mesh=mesh, **self.options)
        if not self.convert_first:
            convert_sync_batchnorm(net)
        return net


SHARDINGS = {
    "converted before": Sharding(),
    "converted after": Sharding(convert_first=False),
    "the whole net as one": Sharding(lambda net: []),
    "a layer by itself": Sharding(layer_and_head),
    "not sharded anew after forward": Sharding(options={"reshard_after_forward": False}),
    "replicated": Sharding(mesh=(2, 1)),
    "of a mesh of 1 x 2": Sharding(mesh=(1, 2), convert_first=False),
}


def whole(tensors):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def train_rank(rank, x):
    states = {}
    for name, sharding in SHARDINGS.items():
        net = sharding.apply(Net().double())
        train_net(net, x[rank::2])
        converted = [isinstance(m, FastSyncBatchNorm) for m in (net.features[1], net.head[1])]
        sharded = all(isinstance(p, DTensor) for p in net.parameters())
        states[name] = whole(net.state_dict()), all(converted) and sharded
    return tree_map_only(torch.Tensor, numpy, states)


@pytest.fixture(scope="module")
def trained(run):
    """The batch, and each rank's state after training on its half of it, for every sharding."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    return x, run(2, train_rank, x)


@pytest.mark.parametrize("name", SHARDINGS)
def test_fsdp_trains_as_one_process_does(trained, name):
    x, ranks = trained
    net = Net().double()
    train_net(net, x)
    for states in ranks:
        state, converted_and_sharded = states[name]
        assert converted_and_sharded
        for key, value in net.state_dict().items():
            np.testing.assert_allclose(state[key], numpy(value), rtol=1e-9, atol=1e-11, err_msg=key)


def stack():
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4)),
    )


def step(net, x, dy):
    """Returns all tensors that a step of training makes."""
    y, dx = train_once(net, x, dy)
    grads = {f"{name}.grad": parameter.grad for name, parameter in net.named_parameters()}
    return {"y": y, "dx": dx, **whole(grads), **dict(net.named_buffers())}


def mixed_rank(rank, x, dy):
    policy = MixedPrecisionPolicy(dy.dtype, reduce_dtype=torch.float32)
    sharding = Sharding(lambda net: [net[0], net[1]], options={"mp_policy": policy})
    results = step(sharding.apply(stack()), x[rank::2], dy[rank::2])
    return {key: (value.dtype, numpy(value)) for key, value in results.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_under_fsdp_is_that_of_one_process(run, dtype):
    """Parameters and input in a narrow type, buffers in float32: which torch's CPU refuses."""
    x, dy = random((4, 3, 9, 9), mean=0.3), random((4, 4, 5, 5), dtype)
    exact, narrow = stack().double(), convert_sync_batchnorm(stack()).to(dtype)
    for layer in (narrow[1], narrow[4]):
        layer.running_mean, layer.running_var = (
            layer.running_mean.float(),
            layer.running_var.float(),
        )
    right, alone = step(exact, x.double(), dy.double()), step(narrow, x.to(dtype), dy)
    first, second = run(2, mixed_rank, x, dy)
    for key, (kind, value) in first.items():
        kept = dtype if key == "y" else torch.int64 if key.endswith("tracked") else torch.float32
        assert kind == second[key][0] == kept, key
        if key in ("y", "dx"):
            value = np.stack([value, second[key][1]], axis=1).reshape(-1, *value.shape[1:])
        if key.endswith(".grad"):
            value = value * 2  # FSDP takes the mean over the ranks
        expected = numpy(right[key])
        own = np.abs(numpy(alone[key]) - expected).max()
        # As accurate as one process, whose error is a draw too, and a rounding a rank.
        rounding = ROUNDING[dtype] * np.abs(expected).max()
        assert np.abs(value - expected).max() <= 2 * own + 3 * rounding, key


def mesh_rank(rank, x):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    meshes = (square["data"], square["model"], init_device_mesh("cpu", (4,)))
    return [numpy(FastSyncBatchNorm(3, process_group=mesh)(x[rank])) for mesh in meshes]


def test_statistics_are_those_of_a_dimension_of_a_mesh(run):
    x = torch.stack([random((2, 3, 4, 4), mean=float(rank)) for rank in range(4)])
    outputs = run(4, mesh_rank, x)
    for index, groups in enumerate(([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]])):
        for group in groups:
            actual = np.concatenate([outputs[rank][index] for rank in group])
            expected = reference.forward(numpy(x[group].flatten(0, 1))).output
            assert_close(actual, expected, torch.float32)
