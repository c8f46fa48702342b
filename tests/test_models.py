"""Converted networks of torchvision and timm: ranks compute what one process does, and train."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from inputs import ROUNDING
from networks import NETWORKS, converted, detector, made, without_chance, without_kinks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WORLD, IMAGES = 2, 2  # ranks, and images a rank


def outputs_of(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    outputs = net(x)
    return outputs if isinstance(outputs, dict) else {"out": outputs}


def results(net: nn.Module, x: Tensor, rank: int | None = None) -> dict[str, Tensor]:
    """Trains for one step and evaluates; returns all that comes of it, in float64.

    The loss is a sum over images, so that the gradients of ranks add up to those of one process.

    Args:
        net: the network, of the type of x.
        x: the images of all ranks.
        rank: whose images to take, in DistributedDataParallel; None for all in one process.
    """
    images = slice(None) if rank is None else slice(rank * IMAGES, (rank + 1) * IMAGES)
    outer = net if rank is None else DistributedDataParallel(net)
    trained = outputs_of(outer.train(), x[images])
    torch.manual_seed(7)
    loss = torch.zeros((), dtype=x.dtype)
    for output in trained.values():
        weight = torch.randn(len(x), *output.shape[1:], dtype=torch.float64).to(x.dtype)
        loss = loss + (output * weight[images]).sum()
    loss.backward()
    with torch.no_grad():
        evaluated = outputs_of(outer.eval(), x[images])
    average = 1 if rank is None else WORLD  # DistributedDataParallel divides by it
    named = {
        **{f"{name} in training": output for name, output in trained.items()},
        **{f"{name} in evaluation": output for name, output in evaluated.items()},
        **{f"{name}.grad": p.grad * average for name, p in net.named_parameters()},
        **dict(net.named_buffers()),
    }
    return {name: tensor.detach().double() for name, tensor in named.items()}


def own_images(expected: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    own = slice(rank * IMAGES, (rank + 1) * IMAGES)
    return {k: v[own] if " in " in k else v for k, v in expected.items()}


def compare_rank(rank, name, x):
    """Returns for every type and tensor how far it is off, in units of what torch allows itself.

    The unit is what the plain network in float32 is off from the one in float64, or what is usual
    in this network if that is larger (a few values can be near by chance); for another type it is
    in proportion to the roundings.
    """

    def network(dtype, smooth, convert):
        net = without_chance(made(NETWORKS[name].build))
        net = without_kinks(net) if smooth else net
        return NETWORKS[name].trace((converted(net) if convert else net).to(dtype))

    errors = {}
    for dtype, smooth in ((torch.float64, False), (torch.float32, True)):
        exact = own_images(results(network(torch.float64, smooth, False), x), rank)
        plain = own_images(results(network(torch.float32, smooth, False), x.float()), rank)
        ours = results(network(dtype, smooth, True), x.to(dtype), rank)
        assert ours.keys() == exact.keys()
        own = {key: (plain[key] - value).norm() for key, value in exact.items()}
        usual = torch.stack([own[key] / value.norm() for key, value in exact.items()]).median()
        for key, value in exact.items():
            unit = torch.maximum(own[key], usual * value.norm())
            off = (ours[key] - value).norm() / unit
            errors[dtype, key] = (off * ROUNDING[torch.float32] / ROUNDING[dtype]).item()
    return errors


@pytest.mark.parametrize("name", NETWORKS)
def test_ranks_compute_what_one_process_does(run, name):
    x = torch.randn(WORLD * IMAGES, *NETWORKS[name].sample, dtype=torch.float64)
    for errors in run(WORLD, compare_rank, name, x):
        wrong = {key: error for key, error in errors.items() if not error <= 6}
        assert errors and not wrong


def detection_loss(net, rank):
    """One rank has two images with boxes, the other an image of another size without any."""
    sizes, boxes = [
        ([(64, 80), (48, 96)], torch.tensor([[4.0, 4, 40, 40], [20, 10, 60, 44]])),
        ([(80, 64)], torch.zeros(0, 4)),
    ][rank]
    target = {"boxes": boxes, "labels": torch.arange(len(boxes)) + 1}
    return sum(net([torch.rand(3, *size) for size in sizes], [target for _ in sizes]).values())


def segmentation_loss(net, rank):
    """The ranks have different counts of images of different sizes, one a single image."""
    shape = [(2, 3, 40, 24), (1, 3, 24, 32)][rank]
    labels = torch.randint(3, (shape[0], *shape[2:]))
    outputs = net(torch.rand(shape))
    return F.cross_entropy(outputs["out"], labels) + 0.5 * F.cross_entropy(outputs["aux"], labels)


#: What trains on batches that differ between ranks: how it is made, and its loss.
UNEVEN = {
    "fasterrcnn_resnet50_fpn": (detector, detection_loss),
    "deeplabv3_resnet50": (NETWORKS["deeplabv3_resnet50"].build, segmentation_loss),
}


def digests(net):
    """Returns a digest of the bits of every parameter and buffer."""
    return {
        name: hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()
        for name, tensor in net.state_dict().items()
    }


def uneven_rank(rank, name):
    """Trains three steps; returns the losses, and the digests before and after each."""
    build, loss_of = UNEVEN[name]
    net = converted(made(build))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    torch.manual_seed(rank)
    losses, states = [], [digests(net)]
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append(digests(net))
    counts = {b.item() for k, b in net.named_buffers() if k.endswith("num_batches_tracked")}
    return losses, states, counts


@pytest.mark.parametrize("name", UNEVEN)
def test_networks_train_on_batches_that_differ_between_ranks(run, name):
    (losses, states, counts), other = run(WORLD, uneven_rank, name)
    assert np.isfinite(losses + other[0]).all() and losses != other[0]
    for step, (ours, theirs) in enumerate(zip(states, other[1], strict=True)):
        assert ours == theirs, f"after step {step}"
    for before, after in pairwise(states):
        still = [name for name in before if before[name] == after[name]]
        assert not still, f"not trained: {still}"
    assert counts == other[2] == {3}
