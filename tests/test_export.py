"""Models as torch.export, AOTInductor, torch.jit.trace and ONNX have them, without this package."""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from inputs import random
from optional import optional
from torch import nn

from syncbn_cuda import convert_sync_batchnorm, revert_sync_batchnorm

pytestmark = pytest.mark.filterwarnings(  # of torch's own making
    "ignore:.*is deprecated", "ignore:.*buffer is not writable", "ignore:.*in training mode"
)

CHANNELS = 4
#: Each makes another graph in evaluation, or takes other arguments.
LAYERS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
#: A batch of more than one value a channel, by the number of dimensions behind the channels.
SHAPES = [(6, 3), (4, 3, 7), (4, 3, 6, 5), (3, 3, 4, 5, 3)]
NORMS = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
FIRST = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
DYNAMIC = torch.export.Dim.DYNAMIC


class Net(nn.Module):
    """A layer, and what batch norms of every kind make of it, each an output of its own."""

    def __init__(self, dims=2, layers=LAYERS):
        super().__init__()
        self.first = FIRST[dims](3, CHANNELS, *[1][:dims])
        self.norms = nn.ModuleList(NORMS[dims](CHANNELS, **layer) for layer in layers)

    def forward(self, x):
        y = self.first(x)
        return tuple(norm(y) for norm in self.norms)


def trained(dims=2, layers=LAYERS, group=None):
    """Returns a converted net after two steps, so that nothing in it has the value it started at.

    Its second step leaves momentum=None and 0.1 with different buffers.
    """
    model = convert_sync_batchnorm(Net(dims, layers), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mean in (1.0, -2.0):
        loss = sum(y.sin().square().mean() for y in model(random(SHAPES[dims], mean=mean)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def shapes_of(x, dynamic):
    """Returns what torch.export is told of an input: that all but its channels may change."""
    return ({dim: DYNAMIC for dim in range(x.dim()) if dim != 1},) if dynamic else None


def namespaces(program):
    """Returns where the operators of a program are from, those of its inner graphs as well."""
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    return {t.namespace for t in targets if isinstance(t, torch._ops.OpOverload)}


#: A process that cannot import this package. It answers each line, the name of a way to load and
#: two files, with an error or an empty line; the results are in the second file then.
ELSEWHERE = """
import json, sys

class Barred:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "syncbn_cuda":
            raise ImportError(f"{name} is barred")

sys.meta_path.insert(0, Barred)
import torch

LOAD = {
    "export": lambda file: torch.export.load(file).module(),
    "aoti": torch._inductor.aoti_load_package,
    "trace": torch.jit.load,
    "import": __import__,
}
for line in sys.stdin:
    how, program, results = json.loads(line)
    try:
        program = LOAD[how](program)
        torch.save([program(x) for x in torch.load(results)], results)
        answer = None
    except Exception as error:
        answer = repr(error)
    operators = torch._C._dispatch_get_all_op_names()
    assert not [name for name in operators if name.startswith("syncbn_cuda")]
    assert "syncbn_cuda" not in sys.modules
    print("answer:", json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Loads a file and runs it on inputs in another process, without this package."""
    folder = tmp_path_factory.mktemp("elsewhere")
    process = subprocess.Popen(
        # -I: not on PYTHONPATH, nor in the folder it starts in, is there anything to import.
        [sys.executable, "-I", "-W", "ignore", "-c", ELSEWHERE],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def results(how, file, *inputs):
        inputs_and_results = folder / "tensors.pt"
        torch.save(inputs, inputs_and_results)
        process.stdin.write(json.dumps([how, str(file), str(inputs_and_results)]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("answer: "):
                error = json.loads(line.removeprefix("answer: "))
                if error is not None:
                    raise RuntimeError(error)
                return torch.load(inputs_and_results)
        pytest.fail("the other process died")

    yield results
    process.stdin.close()
    assert process.wait(60) == 0


def saved(program, folder):
    file = folder / "program.pt2"
    torch.export.save(program, file)
    return file


def other_size(x):
    """Returns another batch, each dimension but the channels' larger by one."""
    return random([size + (dim != 1) for dim, size in enumerate(x.shape)]).to(x.dtype)


def check_elsewhere(elsewhere, how, file, model, *inputs):
    for outputs, x in zip(elsewhere(how, file, *inputs), inputs, strict=True):
        torch.testing.assert_close(outputs, model(x))


def test_this_package_is_missed_where_it_is_barred(elsewhere, tmp_path):
    with pytest.raises(RuntimeError, match="syncbn_cuda is barred"):
        elsewhere("import", "syncbn_cuda")
    model, x = trained().train(), random(SHAPES[2])
    with torch.no_grad():
        file = saved(torch.export.export(model, (x,)), tmp_path)
    torch.export.load(file).module()(x)
    with pytest.raises(RuntimeError, match="deserializ"):
        elsewhere("export", file, x)


KINDS = [(dims, torch.float32, None) for dims in range(4)]
KINDS += [(2, torch.float64, None), (2, torch.bfloat16, None), (2, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("dims, dtype, parameters", KINDS)
def test_an_exported_model_needs_this_package_no_more(
    elsewhere, tmp_path, dims, dtype, parameters, strict, dynamic
):
    model = trained(dims).to(dtype)
    model.norms.to(parameters or dtype)
    x = random(SHAPES[dims], dtype)
    program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes_of(x, dynamic))
    inputs = (x, other_size(x)) if dynamic else (x,)
    for each in (program, program.run_decompositions()):
        assert namespaces(each) == {"aten"}
        check_elsewhere(elsewhere, "export", saved(each, tmp_path), model, *inputs)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_a_model_compiled_ahead_of_time_needs_this_package_no_more(elsewhere, tmp_path):
    model, x = trained(), random(SHAPES[2])
    program = torch.export.export(model, (x,), dynamic_shapes=shapes_of(x, True))
    file = tmp_path / "compiled.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    check_elsewhere(elsewhere, "aoti", file, model, x, other_size(x), x[:1])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_model_needs_this_package_no_more(elsewhere, tmp_path):
    model, x = trained(), random(SHAPES[2])
    torch.jit.trace(model, x).save(tmp_path / "trace.pt")
    check_elsewhere(elsewhere, "trace", tmp_path / "trace.pt", model, x, other_size(x))


@pytest.fixture
def evaluator():
    """Makes a function of an ONNX model, by ONNX's own reference."""
    for name in ("onnx", "onnxscript"):
        optional(name)
    return importlib.import_module("onnx.reference").ReferenceEvaluator


def to_onnx(model, x):
    shapes = shapes_of(x, True)
    return torch.onnx.export(model, (x,), dynamo=True, verbose=False, dynamic_shapes=shapes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("revert", [True, False], ids=["reverted", "converted"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_model_goes_to_onnx_with_batch_norms(evaluator, dims, revert):
    model, x = trained(dims), random(SHAPES[dims])
    inputs = (x, other_size(x))
    expected = [model(each) for each in inputs]
    program = to_onnx(revert_sync_batchnorm(model) if revert else model, x).model_proto
    operators = [node.op_type for node in program.graph.node]
    assert operators.count("Conv") == 1 and operators.count("BatchNormalization") == len(LAYERS)
    run, name = evaluator(program).run, program.graph.input[0].name
    for each, outputs in zip(inputs, expected, strict=True):
        results = tuple(map(torch.from_numpy, run(None, {name: each.numpy()})))
        torch.testing.assert_close(results, outputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_in_training_goes_not_to_onnx(evaluator):
    model = trained().train()
    with torch.no_grad(), pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        to_onnx(model, random(SHAPES[2]))
    assert "syncbn_cuda.batch_norm_stats" in str(raised.value)


def check_training(group, strict):
    """Exports a net in training; it then makes the steps that the net makes, over the group."""
    torch.manual_seed(7)
    model = trained(group=group).train()
    eager = copy.deepcopy(model)
    x = random(SHAPES[2], mean=float(dist.get_rank() if dist.is_initialized() else 0))
    file = io.BytesIO()
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes_of(x, True))
        torch.export.save(program, file)
        loaded = torch.export.load(file).module()
        for inputs in (x, other_size(x)):
            torch.testing.assert_close(loaded(inputs), eager(inputs))
    torch.testing.assert_close(dict(loaded.named_buffers()), dict(eager.named_buffers()))
    return namespaces(program)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_a_program_of_a_model_in_training_makes_the_same_steps(strict):
    assert check_training(None, strict) == {"aten", "syncbn_cuda"}


def training_rank(rank, halves, strict):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if halves else None
    return check_training(groups[rank // 2] if groups else None, strict)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("halves", [True, False], ids=["halves", "world"])
def test_it_makes_them_together_with_its_peers(run, halves, strict):
    found = {"aten", "syncbn_cuda", "_c10d_functional"}
    assert run(4, training_rank, halves, strict) == [found] * 4


def evaluation_rank(rank, own, strict, folder):
    model = trained(group=dist.new_group([0, 1]) if own else None)
    if rank == 0:  # its peer is one that nobody may wait for
        x = random(SHAPES[2])
        program = torch.export.export(model, (x,), strict=strict)
        assert namespaces(program) == {"aten"}
        saved(program, folder)
        torch.save((x, model(x)), folder / "expected.pt")


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("own", [True, False], ids=["own group", "world"])
def test_one_rank_exports_alone_in_evaluation(elsewhere, tmp_path, run, own, strict):
    run(2, evaluation_rank, own, strict, tmp_path)
    x, outputs = torch.load(tmp_path / "expected.pt")
    torch.testing.assert_close(elsewhere("export", tmp_path / "program.pt2", x), [outputs])
