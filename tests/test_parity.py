"""What nn.SyncBatchNorm does and what ours does, side by side: the proofs of the parity table.

Every row runs torch's own layer or conversion as well as ours, on the CPU. What torch's own needs a
GPU for is left out: its failing here would say nothing of it.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from inputs import random
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm, module


class Kind(NamedTuple):
    """A layer and the conversion to it."""

    layer: type[nn.Module]
    convert: Callable[..., nn.Module]


KINDS = {
    "torch": Kind(nn.SyncBatchNorm, nn.SyncBatchNorm.convert_sync_batchnorm),
    "ours": Kind(FastSyncBatchNorm, convert_sync_batchnorm),
}
SHAPE = (4, 3, 5, 5)


def trains(layer):
    layer(random(SHAPE)).sum().backward()
    return "trains"


# Each check tries something with a kind; what it returns or raises is the outcome.


def trains_on_the_cpu(kind):
    return trains(kind.layer(3))


def trains_on_the_cpu_in_a_group_of_one(kind):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return trains(kind.layer(3, process_group=groups[dist.get_rank()]))


def ddp_wraps_a_model_on_the_cpu(kind):
    return trains(DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 3, 1), kind.layer(3))))


def deepcopy_with_a_group(kind):
    layer = kind.layer(3, process_group=dist.new_group([0, 1]))
    return copy.deepcopy(layer).process_group is layer.process_group


def pickle_with_a_group(kind):
    layer = kind.layer(3, process_group=dist.new_group([0, 1]))
    return pickle.loads(pickle.dumps(layer)).process_group


def conversion_keeps_the_group_of_a_synchronised_layer(kind):
    group = dist.new_group([0, 1])
    net = kind.convert(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)))
    return net[0].process_group is group


def conversion_keeps_hooks(kind):
    layer, seen = nn.BatchNorm2d(3), []
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: seen.append("state"))
    layer = kind.convert(layer)
    layer(random(SHAPE).requires_grad_()).sum().backward()
    layer.state_dict()
    return " ".join(seen)


def conversion_keeps_a_shared_layer_shared(kind):
    layer = nn.BatchNorm2d(3)
    net = kind.convert(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)))
    return net[0][0] is net[1][0]


def conversion_reaches_a_layer_that_has_two_names(kind):
    layer = nn.BatchNorm2d(3)
    net = kind.convert(nn.Sequential(layer, nn.ReLU(), layer))
    return all(type(net[index]) is kind.layer for index in (0, 2))


class WithRelu(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


def conversion_keeps_what_a_subclass_computes(kind):
    return kind.convert(WithRelu(3))(random(SHAPE)).min().item() >= 0


def conversion_keeps_a_forward_of_a_layers_own(kind):
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x * 0
    return not kind.convert(layer)(random(SHAPE)).any()


def conversion_keeps_qconfig(kind):
    layer = nn.BatchNorm2d(3)
    layer.qconfig = 7
    return kind.convert(layer).qconfig


def conversion_keeps_a_users_attributes(kind):
    layer = nn.BatchNorm2d(3)
    layer.note = 7
    return kind.convert(layer).note


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def conversion_keeps_a_parametrization(kind):
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", Double())
    x = random(SHAPE)
    return torch.allclose(kind.convert(copy.deepcopy(layer))(x), layer(x), atol=1e-5)


def conversion_keeps_the_very_layer(kind):
    layer = nn.BatchNorm2d(3)
    return kind.convert(layer) is layer


def conversion_keeps_requires_grad_and_parameters(kind):
    layer = nn.BatchNorm2d(3)
    layer.weight.requires_grad_(False)
    converted = kind.convert(layer)
    return converted.weight is layer.weight and not converted.weight.requires_grad


def channels_of_a_converted_lazy_layer(kind):
    return kind.convert(nn.Sequential(nn.LazyBatchNorm2d()))[0].num_features


def batches_counted_under_checkpointing(kind):
    layers = {True: kind.layer(3), False: kind.layer(3)}
    for reentrant, layer in layers.items():
        x = random(SHAPE).requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    return " ".join(str(layer.num_batches_tracked.item()) for layer in layers.values())


def compiles_whole_without_momentum(kind):
    torch.compiler.reset()
    compiled = torch.compile(kind.layer(3, momentum=None), fullgraph=True, backend="eager")
    try:
        return trains(compiled)
    except torch._dynamo.exc.TorchDynamoException:
        return "breaks its graph"


def batches_counted_by_a_refused_call(kind):
    layer = kind.layer(3)
    with pytest.raises((RuntimeError, ValueError)):
        layer(random((4, 5, 5, 5)))
    return layer.num_batches_tracked.item()


def batches_counted_by_an_empty_one(kind):
    layer = kind.layer(3)
    layer(random((0, 3, 5, 5))).sum().backward()
    return layer.num_batches_tracked.item()


def tracking_turned_on_later(kind):
    layer = kind.layer(3, track_running_stats=False)
    layer.track_running_stats = True
    return trains(layer)


def narrow_parameters_and_wide_buffers(kind):
    layer = kind.layer(3).half()
    layer.running_mean, layer.running_var = layer.running_mean.float(), layer.running_var.float()
    return layer(random(SHAPE, torch.float16)).dtype


def a_list_of_ranks_as_the_group(kind):
    kind.layer(3, process_group=[0, 1])
    return "accepted"


def warnings_of_replication_by_data_parallel(kind):
    module._warn_of_replicas.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind.layer(3)._replicate_for_data_parallel()
    return len(caught)


def is_an_instance_of_torchs(kind):
    return isinstance(kind.layer(3), nn.SyncBatchNorm)


RANKS_ROWS = [
    (trains_on_the_cpu, "ValueError: SyncBatchNorm expected input tensor to be on GPU*", "trains"),
    (
        trains_on_the_cpu_in_a_group_of_one,
        "ValueError: SyncBatchNorm expected input tensor to be on GPU*",
        "trains",
    ),
    (
        ddp_wraps_a_model_on_the_cpu,
        "ValueError: SyncBatchNorm layers only work with GPU modules",
        "trains",
    ),
    (deepcopy_with_a_group, "TypeError: cannot pickle *ProcessGroup*", "True"),
    (pickle_with_a_group, "TypeError: cannot pickle *ProcessGroup*", "None"),
    (conversion_keeps_the_group_of_a_synchronised_layer, "False", "True"),
]

ALONE_ROWS = [
    (conversion_keeps_hooks, "", "pre forward backward state"),
    (conversion_keeps_a_shared_layer_shared, "False", "True"),
    (conversion_reaches_a_layer_that_has_two_names, "False", "True"),
    (conversion_keeps_what_a_subclass_computes, "False", "True"),
    (conversion_keeps_a_forward_of_a_layers_own, "False", "True"),
    (conversion_keeps_qconfig, "7", "7"),
    (conversion_keeps_a_users_attributes, "AttributeError: *", "7"),
    (conversion_keeps_a_parametrization, "TypeError: cannot assign *", "True"),
    (conversion_keeps_the_very_layer, "False", "True"),
    (conversion_keeps_requires_grad_and_parameters, "True", "True"),
    (channels_of_a_converted_lazy_layer, "0", "ValueError: *run one batch through the model*"),
    (batches_counted_under_checkpointing, "2 2", "1 1"),
    (batches_counted_by_a_refused_call, "1", "0"),
    (batches_counted_by_an_empty_one, "1", "0"),
    (compiles_whole_without_momentum, "breaks its graph", "trains"),
    (tracking_turned_on_later, "AssertionError: *", "trains"),
    (narrow_parameters_and_wide_buffers, "RuntimeError: expected scalar type*", "torch.float16"),
    (a_list_of_ranks_as_the_group, "accepted", "TypeError: *expected a torch.distributed *"),
    (warnings_of_replication_by_data_parallel, "0", "1"),
    (is_an_instance_of_torchs, "True", "False"),
]


def outcome(check, kind):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ours names what it leaves alone or drops
            return str(check(KINDS[kind]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes_rank(rank):
    return {(row[0].__name__, kind): outcome(row[0], kind) for row in RANKS_ROWS for kind in KINDS}


@pytest.fixture(scope="module")
def ranks(run):
    return run(2, outcomes_rank)


def rows(table):
    """Parametrises by a table: each check, each kind, and the outcome of that kind."""
    return pytest.mark.parametrize(
        ("check", "kind", "expected"),
        [
            pytest.param(check, kind, expected, id=f"{check.__name__}-{kind}")
            for check, *both in table
            for kind, expected in zip(KINDS, both, strict=True)
        ],
    )


@rows(RANKS_ROWS)
def test_on_two_ranks(ranks, check, kind, expected):
    for outcomes in ranks:
        actual = outcomes[check.__name__, kind]
        assert fnmatchcase(actual, expected), actual


@rows(ALONE_ROWS)
def test_alone(check, kind, expected):
    actual = outcome(check, kind)
    assert fnmatchcase(actual, expected), actual
