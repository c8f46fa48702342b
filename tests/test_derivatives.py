"""Derivatives of first to third order against differences, over ranks too, and what uses them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inputs import DTYPES, LAYOUTS, assert_close, numpy, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm
from syncbn_cuda.functional import sync_batch_norm

CHANNELS = 3


def weights_like(tensor, phase):
    """Fixed numbers of both signs: other ones for each tensor that a sum is made of."""
    places = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
    return torch.cos(7 * places + phase).view(tensor.shape)


def quantity(order, variables, peers_phase=0.0):
    """Returns a number made of the derivatives of an order; their own derivative is of the next."""
    y = sync_batch_norm(
        *(variables["x"], None, None, variables.get("weight"), variables.get("bias")), training=True
    )
    value = (y.pow(2) * weights_like(y, peers_phase)).sum()
    for _ in range(order - 1):
        grads = torch.autograd.grad(value, [*variables.values()], create_graph=True)
        terms = [(g * weights_like(g, phase)).sum() for phase, g in enumerate(grads)]
        value = torch.stack(terms).sum()
    return value


def differentiated_rank(rank, counts, order, affine):
    """Each rank in turn perturbs its own variables, while the peers take part in the collectives.

    What is differentiated is the sum over all ranks: an input moves what each of them gets.
    """
    torch.manual_seed(7)
    parameters = torch.rand(2, CHANNELS, dtype=torch.float64).add(0.5).unbind()
    torch.manual_seed(rank)
    variables = {"x": torch.randn(counts[rank], CHANNELS, 2, dtype=torch.float64)}
    if affine:
        variables |= dict(zip(("weight", "bias"), parameters, strict=True))
    variables = {name: value.clone().requires_grad_() for name, value in variables.items()}

    def total(**moved):
        value = quantity(order, {**variables, **moved}, rank).detach()
        dist.all_reduce(value)
        return value.item()

    analytic = torch.autograd.grad(quantity(order, variables, rank), [*variables.values()])
    worst, step = 0.0, 1e-5
    for active, count in enumerate(counts):
        for (name, variable), gradient in zip(variables.items(), analytic, strict=True):
            size = count * CHANNELS * 2 if name == "x" else CHANNELS
            for index in range(size):
                values = []
                for sign in (1, -1):
                    moved = variable.detach().clone()
                    if rank == active:
                        moved.view(-1)[index] += sign * step
                    values.append(total(**{name: moved.requires_grad_()}))
                if rank == active:
                    numeric = (values[0] - values[1]) / (2 * step)
                    error = abs(numeric - gradient.view(-1)[index].item())
                    worst = max(worst, error / max(1.0, abs(numeric)))
    return worst


def all_orders_rank(rank, counts):
    cases = itertools.product((1, 2, 3), (True, False))
    return {case: differentiated_rank(rank, counts, *case) for case in cases}


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (0, 3)], ids=str)
def test_derivatives_of_three_orders_over_ranks(run, counts):
    for errors in run(2, all_orders_rank, counts):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_the_third_derivative(layout, affine):
    x = LAYOUTS[layout](random((2, CHANNELS, 2, 2), torch.float64)).requires_grad_()
    parameters = torch.rand(2, CHANNELS, dtype=torch.float64).add(0.5).requires_grad_().unbind()
    names = ("x", "weight", "bias")[: 1 + 2 * affine]

    def second(*values):
        return quantity(2, dict(zip(names, values, strict=True)))

    assert torch.autograd.gradgradcheck(second, (x, *parameters[: 2 * affine]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_derivative_has_its_types_and_accuracy(layout, dtype):
    x = random((4, CHANNELS, 5, 3), dtype)
    slopes = [weights_like(x, phase).bfloat16().double() for phase in range(2)]  # exact in each
    results = []
    for layer, leaf in (
        (FastSyncBatchNorm(CHANNELS), LAYOUTS[layout](x).detach().requires_grad_()),
        (nn.BatchNorm2d(CHANNELS).double(), x.double().requires_grad_()),
    ):
        value = (layer(leaf).double() * slopes[0]).sum()
        (g,) = torch.autograd.grad(value, leaf, create_graph=True)
        inputs = [leaf, layer.weight]
        second = torch.autograd.grad((g.double() * slopes[1]).sum(), inputs)
        assert [g.dtype, *(s.dtype for s in second)] == [leaf.dtype, *(i.dtype for i in inputs)]
        results.append(second)
    (dx, grad_weight), expected = results[0], [numpy(each) for each in results[1]]
    assert_close(dx, expected[0], dtype)
    assert_close(grad_weight, expected[1], torch.float32)


def input_and_parameters():
    torch.manual_seed(0)
    x = torch.randn(2, 4, CHANNELS, 2, dtype=torch.float64)
    parameters = torch.rand(2, CHANNELS, dtype=torch.float64).add(0.5)
    return x, [p.clone().requires_grad_() for p in parameters]


def uneven_rank(rank, peers):
    """Rank 0 needs the gradients of all variables, its peer that of one parameter alone."""
    pieces, parameters = input_and_parameters()
    x = pieces[rank].clone().requires_grad_(rank == 0)
    y = sync_batch_norm(x, None, None, *parameters, training=True)
    needed = [parameters[peers]] if rank else [x, *parameters]
    grads = torch.autograd.grad(y.pow(3).sum(), needed, create_graph=True)
    torch.stack([g.pow(2).sum() for g in grads]).sum().backward()
    return [numpy(p.grad) for p in parameters], None if rank else numpy(x.grad)


@pytest.mark.parametrize("peers", [0, 1], ids=["weight", "bias"])
def test_ranks_may_need_different_gradients(run, peers):
    x, parameters = input_and_parameters()
    x.requires_grad_()
    mean, var = x.mean((0, 1, 3)), x.var((0, 1, 3), correction=0)
    copies = [p.repeat(2, 1) for p in parameters]
    weight, bias = (copy[:, None, :, None] for copy in copies)
    y = (x - mean[:, None]) / (var[:, None] + 1e-5).sqrt() * weight + bias
    of_x, *of_copies = torch.autograd.grad(y.pow(3).sum(), (x, *copies), create_graph=True)
    of_rank_0 = torch.stack([g[0].pow(2).sum() for g in (of_x, *of_copies)]).sum()
    (of_rank_0 + of_copies[peers][1].pow(2).sum()).backward()
    (own, of_input), (others, _) = run(2, uneven_rank, peers)
    np.testing.assert_allclose(of_input, numpy(x.grad[0]), rtol=1e-9, atol=1e-9)
    for parameter, *grads in zip(parameters, own, others, strict=True):
        np.testing.assert_allclose(sum(grads), numpy(parameter.grad), rtol=1e-9, atol=1e-9)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(
            *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False), nn.LeakyReLU(0.2)),
        )
        self.score = nn.Linear(4, 1)

    def forward(self, x):
        return self.score(self.features(x).mean((2, 3)))


def train_critic(critic, real, fake, steps=3):
    """Steps of a Wasserstein critic with gradient penalty (Gulrajani et al., 2017)."""
    optimizer = torch.optim.SGD(critic.parameters(), 0.05, momentum=0.5)
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    for _ in range(steps):
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizer.step()


def train_on_forces(net, x, forces, steps=3):
    """Steps on a loss of an energy and of forces, its slope by the positions."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        positions = x.detach().requires_grad_()
        energy = net(positions)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        (energy.square().mean() + (slope + forces).square().sum((1, 2, 3)).mean()).backward()
        optimizer.step()


TRAININGS = {"gradient penalty": train_critic, "forces": train_on_forces}


def state_of(net):
    return {key: numpy(value) for key, value in net.state_dict().items()}


def trained_rank(rank, training, pair):
    critic = convert_sync_batchnorm(Critic().double())
    TRAININGS[training](DistributedDataParallel(critic), *(each[rank::2] for each in pair))
    return state_of(critic)


@pytest.mark.parametrize("training", TRAININGS)
def test_trainings_by_second_derivatives_are_those_of_one_process(run, training):
    pair = [random((6, 2, 7, 7), torch.float64, mean=mean) for mean in (0.0, 1.0)]
    plain, alone = Critic().double(), convert_sync_batchnorm(Critic().double())
    for net in (plain, alone):
        TRAININGS[training](net, *pair)
    expected = state_of(plain)
    for state in (state_of(alone), *run(2, trained_rank, training, pair)):
        for key, value in expected.items():
            np.testing.assert_allclose(state[key], value, rtol=1e-8, atol=1e-9, err_msg=key)
