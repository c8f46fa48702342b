"""Copies and pickles of layers and converted models, and graphs that there are not."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from inputs import numpy, random
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from training import saved_and_loaded

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

CHANNELS = 5


def small_net(**arguments):
    norm = nn.BatchNorm2d(CHANNELS, **arguments)
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3), norm, nn.ReLU())


def half_world_rank(rank, make):
    """Makes a copy of a layer whose group is a half of the world; returns whom it talks to."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = FastSyncBatchNorm(CHANNELS, process_group=groups[rank // 2])
    copied = make(layer)
    assert copied is not layer and copied.weight is not layer.weight
    assert copied.process_group is layer.process_group
    copied(random((2, CHANNELS, 4), mean=float(rank)))
    return numpy(copied.running_mean)


def averaged(layer):
    return AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9)).module


def converted_twin(layer):
    """Copies a model that was converted from torch's own layer, with a group, inside of a model."""
    model = nn.Sequential(nn.SyncBatchNorm(CHANNELS, process_group=layer.process_group))
    return copy.deepcopy(nn.ModuleList([convert_sync_batchnorm(model)]))[0][0]


@pytest.mark.parametrize("make", [copy.deepcopy, averaged, converted_twin])
def test_copies_share_the_group(run, make):
    first, second, third, fourth = run(4, half_world_rank, make)
    assert (first == second).all() and (third == fourth).all() and (first != third).all()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def pickle_rank(rank, make):
    group = dist.new_group([0, 1])
    model = convert_sync_batchnorm(small_net(), group)
    with pytest.warns(UserWarning, match="process group cannot be pickled.*world"):
        loaded = make(model)
    assert model[1].process_group is group and loaded[1].process_group is None
    loaded[1].process_group = group
    assert loaded[1].process_group is group
    loaded[1].process_group = None
    convert_sync_batchnorm(loaded, group)
    assert loaded[1].process_group is group
    x = random((2, 3, 6, 6))
    torch.testing.assert_close(loaded(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(convert_sync_batchnorm(small_net()))
    assert type(revert_sync_batchnorm(loaded)[1]) is nn.BatchNorm2d
    return True


@pytest.mark.parametrize("make", [pickled, saved_and_loaded])
def test_pickles_drop_the_group_with_a_warning(run, make):
    assert run(2, pickle_rank, make) == [True, True]


def group_kinds_rank(rank):
    flat = dist.init_device_mesh("cpu", (2,))
    square = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    for given in (flat, flat.get_group(), square["data"], square.get_group("data")):
        layer = FastSyncBatchNorm(CHANNELS, process_group=given)
        assert layer.process_group.size() == 2
        layer(random((2, CHANNELS, 4), mean=float(rank)))
        x = random((2, CHANNELS, 4))
        assert convert_sync_batchnorm(nn.BatchNorm1d(CHANNELS), given)(x).shape == x.shape
    with pytest.raises(ValueError, match="one dimension.*mesh\\['name'\\]"):
        FastSyncBatchNorm(CHANNELS, process_group=square)
    return numpy(layer.running_mean)


def test_a_mesh_stands_for_its_group(run):
    first, second = run(2, group_kinds_rank)
    assert (first == second).all()


@pytest.mark.parametrize("wrong", [[0, 1], 2, "world", object, dist.ProcessGroup], ids=str)
def test_what_is_no_group_is_refused(wrong):
    layer = FastSyncBatchNorm(CHANNELS)
    with pytest.raises(TypeError, match="expected a torch.distributed process group.*new_group"):
        layer.process_group = wrong
    assert layer.process_group is None
    bn = nn.BatchNorm2d(CHANNELS)
    with pytest.raises(TypeError, match="process_group"):
        convert_sync_batchnorm(bn, wrong)
    assert type(bn) is nn.BatchNorm2d


class OfAClass(FastSyncBatchNorm):
    process_group = None


def made_of_torchs_state():
    layer = FastSyncBatchNorm.__new__(FastSyncBatchNorm)
    layer.__setstate__(vars(nn.SyncBatchNorm(CHANNELS)))
    return layer


@pytest.mark.parametrize("make", [lambda: OfAClass(CHANNELS), made_of_torchs_state])
def test_a_layer_that_was_never_given_a_group_has_none(make):
    assert make()(random((2, CHANNELS, 4))).shape == (2, CHANNELS, 4)


def test_averaging_and_its_statistics():
    model = convert_sync_batchnorm(small_net())
    average = AveragedModel(model, use_buffers=True)
    batches = [random((2, 3, 8, 8)) for _ in range(3)]
    for x in batches:
        model(x).sum().backward()
        average.update_parameters(model)
    update_bn(batches, average)
    plain = small_net()
    plain.load_state_dict(average.module.state_dict())
    update_bn(batches, plain)
    for ours, theirs in zip(average.module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_layer_alone_has_no_graph():
    with pytest.raises(torch.fx.proxy.TraceError, match=r"a leaf.*nn.Sequential\(layer\)"):
        torch.fx.symbolic_trace(FastSyncBatchNorm(CHANNELS))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("training", [True, False])
def test_scripting_points_at_reverting(training):
    model = convert_sync_batchnorm(small_net()).train(training)
    with pytest.raises(RuntimeError, match=r"FastSyncBatchNorm\(5\).*revert_sync_batchnorm"):
        torch.jit.script(model)
    assert type(model[1]) is FastSyncBatchNorm
    scripted = torch.jit.script(revert_sync_batchnorm(copy.deepcopy(model)).eval())
    x = random((2, 3, 8, 8))
    torch.testing.assert_close(scripted(x), model.eval()(x))
