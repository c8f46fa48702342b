"""Conversion keeps everything but the class, in place, and reverting is exact."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from optional import optional
from torch import nn
from training import check_same_steps

import syncbn_cuda
from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.bn(self.conv(x)).relu()


class Nested(nn.Module):
    """A net as torchvision writes them: blocks within sequences, a shared layer, other norms."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
        self.layers = nn.Sequential(Block(4), nn.Sequential(Block(4), nn.InstanceNorm2d(4)))
        self.group = nn.GroupNorm(2, 4)
        self.shared = self.stem[1]
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        self.synced = nn.SyncBatchNorm(4)

    def forward(self, x):
        x = self.shared(self.group(self.layers(self.stem(x))))
        return self.head(x.amax((2, 3)))


def batch_norms(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def test_everything_but_the_class_stays():
    net = Nested()
    net.stem[1].weight.requires_grad_(False)
    net.stem[1].num_batches_tracked += 7
    net.layers[0].bn.eval()
    net.layers[0].bn.qconfig = "of the user's"
    net.layers[1][0].bn.weight = net.layers[0].bn.weight  # tied
    net.layers[0].bn.weight.grad = gradient = torch.ones(4)
    before = batch_norms(net)
    classes = {name: type(layer) for name, layer in before.items()}
    text = repr(net)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    state = copy.deepcopy(net.state_dict())
    names = [name for name, _ in net.named_modules()]

    assert convert_sync_batchnorm(net) is net
    after = batch_norms(net)
    assert all(type(layer) is FastSyncBatchNorm for layer in after.values())
    assert all(after[name] is layer for name, layer in before.items())
    for name, tensor in {**dict(net.named_parameters()), **dict(net.named_buffers())}.items():
        assert tensor is tensors[name]
    assert names == [name for name, _ in net.named_modules()]
    assert net.state_dict().keys() == state.keys()
    assert net.shared is net.stem[1] and net.shared.num_batches_tracked == 7
    assert net.shared.momentum is None and not net.shared.weight.requires_grad
    assert net.layers[1][0].bn.weight is net.layers[0].bn.weight
    assert net.layers[0].bn.weight.grad is gradient
    assert not net.layers[0].bn.training and net.layers[0].bn.qconfig == "of the user's"
    assert type(net.layers[1][1]) is nn.InstanceNorm2d and type(net.group) is nn.GroupNorm

    assert revert_sync_batchnorm(net) is net
    assert {name: type(layer) for name, layer in batch_norms(net).items()} == classes
    assert repr(net) == text
    assert vars(net.shared).keys() == vars(nn.BatchNorm2d(4)).keys(), "something was left behind"


def test_conversion_changes_no_value():
    plain = Nested().double()
    net = copy.deepcopy(plain)
    for step in (convert_sync_batchnorm, revert_sync_batchnorm):
        check_same_steps(step(net), plain, torch.randn(4, 3, 9, 9, dtype=torch.float64))


def refusals(layer):
    """Returns what a layer says to inputs of 1 to 6 dimensions, "" where it takes them."""
    said = []
    for dims in range(1, 7):
        try:
            layer(torch.randn(2, 3, *[2] * (dims - 2)) if dims > 1 else torch.randn(3))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
)
def test_a_root_that_is_itself_a_batch_norm(layer):
    module = layer(3)
    assert convert_sync_batchnorm(module) is module and type(module) is FastSyncBatchNorm
    assert type(FastSyncBatchNorm.convert_sync_batchnorm(module)) is FastSyncBatchNorm
    assert refusals(module)[1:] == [""] * 5
    assert type(revert_sync_batchnorm(module)) is layer
    # Torch's synchronised layer refuses the CPU in training.
    assert refusals(module.eval()) == refusals(layer(3).eval())


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("where", [{"device": "meta"}, {"device": "cpu"}, {"dtype": torch.float64}])
def test_device_and_type_stay_whatever_the_default_is(where, default):
    net = Nested().to(**where)
    with torch.device(default):
        convert_sync_batchnorm(net)
    for tensor in net.state_dict().values():
        if tensor.is_floating_point():
            like = torch.empty(0, **where)
            assert (tensor.device.type, tensor.dtype) == (like.device.type, like.dtype)


def test_the_optimizer_keeps_its_parameters():
    net = Nested()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    convert_sync_batchnorm(net)
    before = net.stem[1].weight.detach().clone()
    net(torch.randn(4, 3, 9, 9)).pow(3).sum().backward()
    optimizer.step()
    assert not torch.equal(net.stem[1].weight, before)


def hooked(layer, seen):
    """Registers a hook of every kind, which notes that it ran."""

    def note(name, value=None):
        return lambda *arguments, **named: (seen.append(name), value)[1]

    layer.register_forward_pre_hook(note("forward_pre"))
    layer.register_forward_hook(note("forward"))
    layer.register_forward_hook(note("always"), always_call=True)
    layer.register_forward_hook(note("with kwargs"), with_kwargs=True)
    layer.register_full_backward_pre_hook(note("backward_pre"))
    layer.register_full_backward_hook(note("backward"))
    layer.register_state_dict_pre_hook(note("state_dict_pre"))
    layer.register_state_dict_post_hook(note("state_dict"))
    layer.register_load_state_dict_pre_hook(note("load_pre"))
    layer.register_load_state_dict_post_hook(note("load"))
    layer.weight.register_hook(note("gradient"))


@pytest.mark.parametrize("reverted", [False, True])
def test_hooks_of_every_kind_run_as_before(reverted):
    plain, ours = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    ran = {plain: [], ours: []}
    for layer in ran:
        hooked(layer, ran[layer])
    convert_sync_batchnorm(ours)
    if reverted:
        revert_sync_batchnorm(ours)
    for layer in ran:
        layer(torch.randn(2, 3, 4, 4, requires_grad=True)).sum().backward()
        layer.load_state_dict(layer.state_dict())
    assert ran[ours] == ran[plain] and len(ran[plain]) == 11


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_lazy_layer_is_refused_before_anything_changes(dims):
    plain = getattr(nn, f"BatchNorm{dims}d")
    net = nn.Sequential(plain(3), getattr(nn, f"LazyBatchNorm{dims}d")())
    text, kept = repr(net), [[*vars(layer)] for layer in net]
    with pytest.raises(ValueError, match="expected '1' to know its number of channels"):
        convert_sync_batchnorm(net)
    assert type(net[0]) is plain and repr(net) == text
    assert [[*vars(layer)] for layer in net] == kept
    net(torch.randn(2, 3, *[4] * dims))
    convert_sync_batchnorm(net)
    assert type(net[1]) is FastSyncBatchNorm and net[1].num_batches_tracked == 1
    assert type(revert_sync_batchnorm(net)[1]) is plain


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_instance_norm_stays(dims, track):
    build = getattr(nn, f"InstanceNorm{dims}d")
    plain = nn.Sequential(build(3, affine=True, track_running_stats=track))
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    assert type(net[0]) is build and repr(net) == repr(plain)
    check_same_steps(net, plain, torch.randn(2, 3, *[4] * dims))


def test_converting_twice_and_a_model_without_batch_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = convert_sync_batchnorm(convert_sync_batchnorm(Nested()))
        convert_sync_batchnorm(nn.Linear(2, 2))
    assert type(revert_sync_batchnorm(net).stem[1]) is nn.BatchNorm2d


def test_a_layer_that_was_never_anything_else_becomes_the_default():
    net = nn.Sequential(FastSyncBatchNorm(3))
    assert type(revert_sync_batchnorm(net)[0]) is nn.BatchNorm2d
    net = nn.Sequential(FastSyncBatchNorm(3))
    assert type(revert_sync_batchnorm(net, nn.BatchNorm3d)[0]) is nn.BatchNorm3d


@pytest.mark.parametrize(
    "default", [nn.Linear, FastSyncBatchNorm, nn.BatchNorm2d(3), "BatchNorm1d"]
)
def test_a_default_that_is_no_class_of_torchs_changes_nothing(default):
    net = nn.Sequential(FastSyncBatchNorm(3))
    with pytest.raises(TypeError, match="expected default to be a class of torch's batch norms"):
        revert_sync_batchnorm(net, default)
    assert type(net[0]) is FastSyncBatchNorm


def test_torchs_converter_undoes_ours():
    net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    assert type(nn.SyncBatchNorm.convert_sync_batchnorm(net)[0]) is nn.SyncBatchNorm


@pytest.mark.parametrize("ours", ["converted", "reverted"])
@pytest.mark.parametrize("theirs", ["plain", "torch's synchronised"])
def test_state_goes_both_ways(ours, theirs):
    net, other = convert_sync_batchnorm(Nested().eval()), Nested().eval()
    if ours == "reverted":
        revert_sync_batchnorm(net)
    if theirs != "plain":
        other = nn.SyncBatchNorm.convert_sync_batchnorm(other)
    x = torch.randn(4, 3, 9, 9)
    for source, target in ((net, other), (other, net)):
        before = target(x)
        for tensor in source.state_dict().values():
            tensor.add_(1)
        target.load_state_dict(source.state_dict())
        for key, value in source.state_dict().items():
            assert torch.equal(target.state_dict()[key], value), key
        torch.testing.assert_close(target(x), source(x))
        assert not torch.allclose(target(x), before)


def test_save_and_load(tmp_path):
    net = convert_sync_batchnorm(Nested())
    net(torch.randn(4, 3, 9, 9))
    torch.save(net, tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(loaded.eval()(x), net.eval()(x))
    assert type(revert_sync_batchnorm(loaded).stem[1]) is nn.BatchNorm2d
    copied = copy.deepcopy(net)
    torch.testing.assert_close(copied(x), net(x))


def groups_rank(rank):
    own, other = torch.distributed.new_group([0, 1]), torch.distributed.new_group([0, 1])
    net = Nested()
    net.synced.process_group = other
    convert_sync_batchnorm(net)
    net = copy.deepcopy(net)  # refused where a layer still had the group itself
    kept = net.synced.process_group is other and net.stem[1].process_group is None
    net = convert_sync_batchnorm(Nested(), own)
    given = all(layer.process_group is own for layer in batch_norms(net).values())
    revert_sync_batchnorm(net)
    return kept, given, "process_group" in vars(net.stem[1]), net.synced.process_group


def test_the_group_reaches_every_layer(run):
    assert run(2, groups_rank) == [(True, True, False, None)] * 2


def test_torchvision_models():
    models = optional("torchvision.models")
    for build in (models.resnet18, models.mobilenet_v3_small):
        torch.manual_seed(0)
        plain = build(weights=None)
        ours = convert_sync_batchnorm(copy.deepcopy(plain))
        assert not any(type(m) is nn.BatchNorm2d for m in ours.modules())
        x = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(ours.eval()(x), plain.eval()(x))
        assert repr(revert_sync_batchnorm(ours)) == repr(plain)


def test_no_private_batch_norm_operator_of_torch_is_used():
    from pathlib import Path

    for source in Path(syncbn_cuda.__file__).parent.rglob("*.py"):
        text = source.read_text()
        assert "torch.batch_norm_" not in text and "aten.batch_norm" not in text, source
