"""Running statistics over ranks: their mean, and their computation anew from the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_cuda import _running
from syncbn_cuda._collective import hold_group, resolve_group
from syncbn_cuda._exchange import gather_or_raise, own_rank
from syncbn_cuda._lockstep import Lockstep, Peers, peers_of
from syncbn_cuda.report import is_synchronized


class _Buffers(NamedTuple):
    """What a rank tells before buffers are averaged."""

    layers: list[_running.Signature]
    counters: list[int]  # 1 where there is none
    weight: float | None  # for all of them


class _Pass(NamedTuple):
    """What a rank tells before a pass over its data."""

    layers: list[_running.Signature]
    pool: tuple[int, ...]
    peers: set[Peers]


@torch.no_grad()
def reduce_running_stats(
    model: nn.Module, process_group: Any | None = None, *, count: float | None = None
) -> None:
    r"""Makes the running statistics of every batch norm their mean over ranks, weighted by count.

    .. math::
        \bar{m} = \sum_r \frac{n_r}{\sum_s n_s} m_r

    for running mean and variance alike. For ``nn.BatchNorm`` under ``DistributedDataParallel``,
    where each rank has its own and rank 0's are saved; and for phases in which ranks train apart.
    A collective: every rank of the group calls it.

    Args:
        model: a model, wrapped or not; each ``nn.BatchNorm*``, :class:`FastSyncBatchNorm` and
            subclass of these that has running buffers is meant, in training and in evaluation.
        process_group: the ranks to average over, or a one-dimensional ``DeviceMesh`` of them; None
            for the world.
        count: the weight of this rank, for example the samples it has seen; on all ranks or none.
            None for each layer's ``num_batches_tracked``, or equal weights where a layer has none.

    Raises:
        ValueError: the model differs between ranks, a layer is lazy and has seen no input, or
            ``count`` is negative, not finite, or given on some ranks only. Then every rank raises,
            and nothing is changed; so it is where this rank is not a member of the group.
        TypeError: ``process_group`` is no process group.
        RuntimeError: another rank raised one of these.

    Note:
        ``DistributedDataParallel`` begins each forward with the buffers of rank 0 on all ranks:
        give it ``broadcast_buffers=False``, or there is one batch of each rank to average.

        The mean of the ranks' variances is not the variance of their data: it lacks what the ranks'
        means differ by, and running buffers forget. For the statistics of the data itself see
        :func:`recompute_running_stats`.

        One ``all_reduce`` in float64 for all layers, after one exchange on the host. Buffers keep
        type and device and are the same bits on every rank; ``num_batches_tracked`` becomes the
        largest. A rank with weight 0 adds nothing, whatever it holds; where all weights are 0 the
        layer stays as it is. Alone in the world there is nothing to do.

    Example::

        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> reduce_running_stats(model)  # in a world of ranks, at the end of an epoch
    """
    caller = "reduce_running_stats"
    group = resolve_group(hold_group(process_group))
    if group is None:
        return
    layers = {}

    def declare() -> _Buffers:
        weight = None if count is None else float(count)
        if weight is not None and not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{caller}: expected count to be finite and at least 0, got {count}")
        layers.update(_running.tracking(caller, _running.unwrapped(model)))
        counters = [layer.num_batches_tracked for layer in layers.values()]
        numbers = [1 if counter is None else int(counter) for counter in counters]
        return _Buffers(_running.signatures(layers), numbers, weight)

    told = gather_or_raise(caller, declare, None if process_group is None else group)
    _running.check_alike(caller, {rank: one.layers for rank, one in told.items()})
    given = [one.weight for one in told.values()]
    if None in given and any(weight is not None for weight in given):
        raise ValueError(f"{caller}: expected count on every rank or on none, got {given}")
    rank = own_rank()
    averaged: list[tuple[_BatchNorm, Tensor]] = []
    for i, layer in enumerate(layers.values()):
        weights = {
            peer: one.counters[i] if one.weight is None else one.weight
            for peer, one in told.items()
        }
        total = math.fsum(weights.values())
        if total > 0:
            own = torch.cat([buffer.double() for buffer in _running.buffers_of(layer)])
            share = weights[rank] / total
            averaged.append((layer, own * share if share else torch.zeros_like(own)))
    means = _running.sum_over(group, [own for _, own in averaged])
    for (layer, _), mean in zip(averaged, means, strict=True):
        for buffer, value in zip(_running.buffers_of(layer), mean.chunk(2), strict=True):
            buffer.copy_(value)
    for i, layer in enumerate(layers.values()):
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(max(one.counters[i] for one in told.values()))


@torch.no_grad()
def recompute_running_stats(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    device: torch.device | str | int | None = None,
    num_batches: int | None = None,
    process_group: Any | None = None,
) -> None:
    """Computes the running statistics of every batch norm anew: precise batch norm, over all ranks.

    One pass over the data, forward only, with layers that normalise by their batches as in
    training. The running buffers become the mean and the unbiased variance of all values that came
    to a layer, on all ranks together, each value counted once. A collective: every rank of the
    world calls it, with as many batches as it has, be it none.

    Args:
        model: a model, wrapped or not. In training, layers in evaluation (frozen ones) stay as they
            are. In evaluation, ``model.train()`` holds for the pass, for dropout too, as in
            ``torch.optim.swa_utils.update_bn``.
        loader: gives this rank's batches: a tensor, or a list or tuple with the input first.
        device: where each input is moved first, if given.
        num_batches: how many batches to use at most, on each rank.
        process_group: the ranks whose data counts together, or a one-dimensional ``DeviceMesh`` of
            them; None for the world.

    Raises:
        ValueError: no rank of a group has a batch; the model or the group differs between ranks; a
            layer is lazy and has seen no input; or the model is sharded (FSDP) and loaders are
            unequal. Then every rank raises.
        RuntimeError: another rank raised something, in its loader or its forward.
        Exception: what the loader or the forward raises. Whatever is raised, model and layers are
            as they were.

    Note:
        Ranks that have run out of batches stay in the pass, and synchronised layers normalise over
        the others, by smaller groups made for it. Such a layer's peers wait for a rank that raises
        within a forward, until their group's timeout; what loaders raise all ranks hear of at once.

        Sums are float64 and stay on the device; one ``all_reduce`` at the end, and a small exchange
        on the CPU before each batch. A large mean costs a variance nothing. Buffers are the same
        bits on every rank; all other buffers, ``num_batches_tracked`` and each module's
        ``training`` come back as they were, and a layer that saw no value keeps its buffers. A
        layer with ``skip_nonfinite_update`` does without a rank's batch that has NaN or Inf. What
        is compiled runs eagerly. The caller's ``autocast`` holds. A model without a layer to
        compute is not run.

    Example::

        >>> model = nn.Sequential(nn.BatchNorm1d(2)).eval()
        >>> recompute_running_stats(model, [torch.zeros(2, 2), torch.ones(2, 2)])
        >>> model[0].running_var
        tensor([0.3333, 0.3333])

    Reference:
        Wu & Johnson, Rethinking "Batch" in BatchNorm, 2021, https://arxiv.org/abs/2105.07576
    """
    caller = "recompute_running_stats"
    net = _running.unwrapped(model)
    layers: dict[str, _BatchNorm] = {}
    synchronised: dict[nn.Module, Peers] = {}
    group: Any | None = None
    with ExitStack() as undone:

        def declare() -> _Pass:
            nonlocal group
            if num_batches is not None and num_batches < 1:
                raise ValueError(f"{caller}: expected num_batches of 1 or more, got {num_batches}")
            group = resolve_group(hold_group(process_group))
            found = _running.tracking(caller, net)
            undone.enter_context(_running.unmarked(net))
            if not net.training:
                net.train()
            layers.update((name, layer) for name, layer in found.items() if layer.training)
            for layer in net.modules():
                if layer.training and is_synchronized(layer):
                    peers = peers_of(layer)
                    if peers is not None:
                        synchronised[layer] = peers
            alone = (own_rank(),)
            pool = alone if group is None else tuple(dist.get_process_group_ranks(group))
            return _Pass(_running.signatures(layers), pool, set(synchronised.values()))

        told = gather_or_raise(caller, declare)
        pools = _pools(caller, told)
        if not any(one.layers for one in told.values()):
            return
        everyones = {peers for one in told.values() for peers in one.peers}
        totals: dict[_BatchNorm, Tensor] = {}
        for layer in layers.values():
            undone.callback(_running.record(layer, totals))
        undone.enter_context(_running.eagerly())
        with Lockstep(caller, synchronised, everyones) as lockstep:
            _running.run(caller, net, loader, device, num_batches, lockstep, pools)
    parts = [
        totals[layer] if layer in totals else _running.message_of_nothing(layer)
        for layer in layers.values()
    ]
    for layer, total in zip(layers.values(), _running.sum_over(group, parts), strict=True):
        _running.write(layer, total)


def _pools(caller: str, told: Mapping[int, _Pass]) -> set[tuple[int, ...]]:
    """Returns the sets of ranks whose data counts together.

    Raises:
        ValueError: ranks do not agree about them, or about their layers.
    """
    for rank, one in told.items():
        for other in one.pool:
            if told[other].pool != one.pool:
                raise ValueError(
                    f"{caller}: expected process_group to be the same on all its ranks, got ranks "
                    f"{list(one.pool)} on rank {rank} and {list(told[other].pool)} on rank {other}"
                )
        _running.check_alike(caller, {other: told[other].layers for other in one.pool})
    return {one.pool for one in told.values()}
