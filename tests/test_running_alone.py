"""recompute_running_stats in one process: which layers it takes, and what it leaves."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from inputs import DTYPES, assert_close, numpy, random
from test_running_recompute import check, expected, loaders, marks, model, running
from torch import nn

from syncbn_cuda import convert_sync_batchnorm, recompute_running_stats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("convert", [True, False])
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_buffers_are_mean_and_unbiased_variance_of_all_values(dtype, convert, mean):
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    net = nn.Sequential(nn.BatchNorm2d(5, dtype=kept))
    batches = [random((n, 5, 3, 4), dtype, mean) for n in (2, 7, 1)]
    batches[1] = batches[1].to(memory_format=torch.channels_last)[::2]  # not dense
    recompute_running_stats(convert_sync_batchnorm(net) if convert else net, batches)
    values = np.concatenate([numpy(batch) for batch in batches]).swapaxes(0, 1).reshape(5, -1)
    assert net[0].running_var.dtype == kept
    assert_close(net[0].running_mean, values.mean(1), kept)
    assert_close(net[0].running_var, values.var(1, ddof=1), kept)


def test_frozen_layers_stay_and_the_others_see_what_they_give():
    net, (batches,) = model().train(), loaders((3,))
    net[0].eval()
    net[0].running_mean.fill_(2.0)
    net[0].running_var.fill_(9.0)
    before, frozen = marks(net), running(net)["0"]
    recompute_running_stats(net, batches)
    assert marks(net) == before
    got = running(net)
    rest = model()
    rest[0] = copy.deepcopy(net[0])
    right = expected([batches], [[0]], rest)
    check(got, right | {"0": frozen})


def test_a_layer_that_saw_no_value_keeps_its_buffers():
    net = nn.ModuleDict({"used": nn.BatchNorm1d(3), "not": nn.BatchNorm1d(3)}).double()
    net.forward = net["used"].forward  # past its hooks
    net["not"].running_mean.fill_(5.0)
    before = running(net)
    recompute_running_stats(net, loaders((2,))[0])
    check(running(net), before)
    converted = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)).double())
    recompute_running_stats(converted, [torch.zeros(0, 3, dtype=torch.float64)])
    check(running(converted), {"0": (np.zeros(3), np.ones(3))})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_layers_that_skip_what_is_not_finite_do_without_such_a_batch(bad):
    (batches,) = loaders((3,))
    poisoned = batches[1].clone()
    poisoned[0, 1] = bad
    net = convert_sync_batchnorm(model(), skip_nonfinite_update=True)
    recompute_running_stats(net, [batches[0], poisoned, *batches[1:]])
    check(running(net), expected([batches], [[0]]))
    convert_sync_batchnorm(net, skip_nonfinite_update=False)
    recompute_running_stats(net, [*batches, poisoned])
    assert not np.isfinite(running(net)["0"][0]).all()


@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
def test_compiled_models_run_eagerly_for_the_pass(how):
    net, (batches,) = model(), loaders((3,))
    right = expected([batches], [[0]])
    compiled = net
    if how == "wrapped":
        compiled = torch.compile(net, backend="eager")
    elif how == "in place":
        net.compile(backend="eager")
    else:
        net[6] = torch.compile(net[6], backend="eager")
    with torch.no_grad():  # as the pass: else it would be compiled anew there
        compiled(batches[0])
    recompute_running_stats(compiled, batches)
    got = {name.replace("_orig_mod.", ""): values for name, values in running(net).items()}
    check(got, right)


def test_drop_out_drops_as_in_training_and_autocast_holds():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    types = []
    net[2].register_forward_pre_hook(lambda _, args: types.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        recompute_running_stats(net, [torch.ones(64, 4)], device="cpu")
    assert types == [torch.bfloat16] and (net[2].running_var > 0).all()
    assert not any(module.training for module in net.modules())


class Caching(nn.Module):
    """Fills a buffer that was empty."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("cache", None)

    def forward(self, x):
        self.cache = x
        return self.norm(x)


def test_a_buffer_that_was_empty_is_empty_again():
    net = Caching()
    recompute_running_stats(net, [torch.ones(2, 3)])
    assert net.cache is None and (net.norm.running_var == 0).all()


def test_a_batch_that_cannot_be_moved_is_an_error_with_a_remedy():
    batches = [{"image": torch.ones(2, 3)}]
    with pytest.raises(TypeError, match=r"^recompute_.*got dict, .* to cpu: give a generator"):
        recompute_running_stats(nn.Sequential(nn.BatchNorm1d(3)), batches, device="cpu")


def test_a_loader_without_batches_is_an_error():
    net = model()
    before = running(net)
    with pytest.raises(ValueError, match="expected a batch or more, the loader gave none$"):
        recompute_running_stats(net, [])
    check(running(net), before)


def test_without_a_layer_to_compute_the_loader_is_not_asked():
    net = model().train()
    for layer in net:
        layer.eval()
    before = running(net)
    recompute_running_stats(net, iter(lambda: pytest.fail("asked"), None))
    check(running(net), before)
