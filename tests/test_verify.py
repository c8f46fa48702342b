"""The health check is silent where all is right, leaves the model alone, says the same to all."""

from __future__ import annotations

import copy
import pickle
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_convert_report import APEX, Frozen, Unknown
from test_verify_layers import converted, net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from syncbn_cuda import (
    VerificationError,
    convert_sync_batchnorm,
    sync_groups,
    verify,
)
from syncbn_cuda.health import facts


def frozen():
    model = converted(net())
    model.bn.eval()
    return model


def frozen_subclass():
    """Left by conversion, but it evaluates."""
    model = converted(net(Unknown))
    model.bn.eval()
    return model


def with_layers_that_need_none():
    return converted(nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), Frozen()))


def of_several_types():
    return converted(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(70).double(), net().half()))


def without_tensors():
    return converted(nn.Sequential(nn.BatchNorm2d(4, affine=False, track_running_stats=False)))


def all_frozen():
    """None is converted, and none has to be."""
    model = net()
    model.bn.eval()
    model.last.eval()
    return model


#: Models that are right in every world.
MODELS = {
    "converted": lambda: converted(net()),
    "selected": lambda: convert_sync_batchnorm(net(), select="last"),
    "under DDP": lambda: DistributedDataParallel(converted(net())),
    "converted after wrapping": lambda: converted(DistributedDataParallel(net())),
    "compiled": lambda: torch.compile(DistributedDataParallel(converted(net()))),
    "a frozen layer": frozen,
    "a frozen subclass": frozen_subclass,
    "all layers frozen": all_frozen,
    "in evaluation": lambda: converted(net()).eval(),
    "other normalisation": with_layers_that_need_none,
    "none that normalises": lambda: nn.Sequential(nn.Linear(3, 3)),
    "several types": of_several_types,
    "no tensors": without_tensors,
    "meta device": lambda: converted(net()).to("meta"),
}


def silent_rank(rank):
    return {name: (verify(make()).findings, str(verify(make()))) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def silent(run):
    return run(2, silent_rank)


def test_correct_models_are_silent(silent):
    first, second = silent
    assert first == second
    assert {name: findings for name, (findings, _) in first.items() if findings} == {}
    assert all(text.endswith("nothing found") for _, text in first.values())


@pytest.mark.parametrize("name", ["under DDP", "converted after wrapping", "compiled"])
def test_wrappers_leave_no_trace_in_names(silent, name):
    assert silent[0][name] == silent[0]["converted"]


def by_mesh(rank):
    return converted(net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("m", "d"))["d"])


def by_stage(rank):
    """Each half of the ranks holds other layers."""
    model = nn.Sequential(nn.BatchNorm1d(4)) if rank < 2 else net()
    return converted(model, sync_groups(2))


def of_both_dimensions(rank):
    """Groups that cross: rows for one layer, columns for the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("m", "d"))
    model = converted(net(), mesh["d"])
    model.last.process_group = mesh["m"]
    return model


DIVISIONS = {
    "all 4 ranks": lambda rank: converted(net(), dist.group.WORLD),
    "ranks 0-1 | 2-3": lambda rank: converted(net(), sync_groups(2)),
    "ranks 0-2 | 3": lambda rank: converted(net(), sync_groups(3, ragged=True)),
    "ranks 0-1 | 2-3 ": by_mesh,
    "ranks 2-3": by_stage,
    "ranks 0, 2 | 1, 3": of_both_dimensions,
}


def divisions_rank(rank):
    return [verify(make(rank)) for make in DIVISIONS.values()]


def test_groups_that_divide_the_ranks_are_silent(run):
    first, *others = run(4, divisions_rank)
    assert others == [first] * 3
    assert [report.findings for report in first] == [[]] * len(DIVISIONS)
    assert [report.layers[-1].over for report in first] == [name.strip() for name in DIVISIONS]


def test_the_report_of_a_mixed_model(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = converted(nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), Unknown(4), Frozen()))
    model[0].eval()
    head = "\n".join(line.rstrip() for line in str(verify(model)).splitlines()[:4])
    assert head.split("a subclass, Unknown")[0] == (
        "0  FastSyncBatchNorm  a world of one  from BatchNorm2d, in evaluation\n"
        "1  GroupNorm          own samples     normalises each sample by itself\n"
        "2  Unknown            own rank        "
    )


def raising_rank(rank):
    model = net()
    with pytest.raises(VerificationError) as caught:
        verify(model, raise_on_error=True)
    assert verify(converted(model), raise_on_error=True).findings == []
    return str(caught.value), caught.value


def test_what_is_found_is_raised_on_every_rank(run):
    (text, error), other = run(2, raising_rank)
    assert other[0] == text == str(error) == str(error.report)
    assert error.report.findings and "1 found:" in text
    assert str(pickle.loads(pickle.dumps(error))) == text


def undescribed_rank(rank):
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        verify(net() if rank == 0 else "net")
    return str(caught.value)


def test_a_rank_that_cannot_answer_fails_all(run):
    first, second = run(2, undescribed_rank)
    assert "no attribute" in second
    assert first == f"verify: rank 1 raised AttributeError: {second}"


def untouched_rank(rank):
    model = converted(net())
    parametrizations.spectral_norm(model.conv)  # reading its weight moves its buffers
    model(torch.randn(2, 4, 8, 8)).sum().backward()
    model.last.eval()
    model.bn.register_forward_hook(lambda *args: pytest.fail("the model's own layer was called"))
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    versions = [t._version for t in model.state_dict(keep_vars=True).values()]
    random_state = torch.get_rng_state()
    assert verify(model).findings == []
    assert [t._version for t in model.state_dict(keep_vars=True).values()] == versions
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in (model, model.bn, model.last)] == [True, True, False]
    for a, b in zip(grads, model.parameters(), strict=True):
        assert torch.equal(a, b.grad)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    return len(state)


def test_the_model_is_left_as_it_is(run):
    assert run(2, untouched_rank) == [14, 14]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("0,1,2", ("host GPU uuid-0", "host GPU uuid-2")),
        ("MIG-5", ("host MIG-5",)),
    ],
)
def test_gpus_are_known_by_host_and_uuid(monkeypatch, visible, gpus):
    """Of a model on two GPUs, or a slice of one, as far as that shows without one."""
    devices = [torch.device(name) for name in ("cpu", "cuda:2", "cuda:0", "cuda:2")]
    tensors = [SimpleNamespace(device=d, is_cuda=d.type == "cuda") for d in devices]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}")
    )
    model = SimpleNamespace(parameters=lambda: tensors[:2], buffers=lambda: tensors[2:])
    assert facts.gpus_of(model) == gpus


class OwnGroup:
    """A group of another kind than torch's, which tells nothing of its ranks."""

    def size(self):
        return 2

    def allreduce(self, tensors, options):
        pytest.fail("a sum over ranks that nobody knows")


def test_a_group_of_another_kind_is_not_tried():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report = verify(converted(net(), OwnGroup()))
    finally:
        dist.destroy_process_group()
    assert report.findings == [] and report.layers[0].over == "unknown ranks"


def test_a_lazy_layer_has_to_see_a_batch_first(run):
    findings = run(2, lazy_rank)
    assert findings[0] == findings[1]
    ((problem, layers, ranks, _),) = findings[0]
    assert "does not know its number of channels" in problem
    assert (layers, ranks) == (("1",), (0, 1))


def lazy_rank(rank):
    model = nn.Sequential(converted(nn.BatchNorm2d(4)), nn.LazyBatchNorm2d())
    return verify(model).findings


def test_foreign_layers_are_in_the_table_and_not_in_the_trial():
    apexs = type("SyncBatchNorm", (nn.modules.batchnorm._BatchNorm,), {"__module__": APEX})
    report = verify(nn.Sequential(apexs(4)).to("meta"))
    assert report.layers[0].over == "a world of one"
    assert report.findings == [] and "none, as no layer of this package" in report.notes[-1]


class Counting(nn.Sequential):
    """Counts how often someone begins to go through all of its parameters."""

    asked = 0

    def parameters(self, recurse=True):
        self.asked += 1
        yield from super().parameters(recurse)


def test_layers_do_not_each_go_through_all_parameters():
    asked = []
    for size in (1, 20):
        model = converted(Counting(*(nn.BatchNorm1d(2) for _ in range(size))))
        assert verify(model).findings == []
        asked.append(model.asked)
    assert asked[0] == asked[1]
