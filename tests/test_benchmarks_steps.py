"""The benchmark of training steps, and its nets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarked import CPU, TINY, assert_spreads
from torch import nn

from benchmarks import compilation, models, steps, training
from benchmarks.options import Options


@pytest.mark.parametrize("dimensions", [2, 3])
def test_unet_keeps_the_sides_and_sees_all_of_its_input(dimensions: int) -> None:
    net = models.UNet(dimensions, channels=3, classes=5, width=4, depth=2)
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert [m.num_features for m in norms] == [4, 4, 8, 8, 16, 16, 8, 8, 4, 4]
    images = torch.randn(2, 3, *(8,) * dimensions)
    logits = net(images)
    assert logits.shape == (2, 5, *(8,) * dimensions)
    F.cross_entropy(logits, torch.zeros(2, *(8,) * dimensions, dtype=torch.long)).backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_resnet50_is_the_one_that_is_installed() -> None:
    net = models.resnet50()
    if net is None:
        pytest.skip("neither torchvision nor timm is installed")
    assert sum(type(m) is nn.BatchNorm2d for m in net.modules()) == 53


@pytest.fixture
def small_unet(monkeypatch: pytest.MonkeyPatch) -> Iterator[models.Task]:
    """The only net to train, on one thread: several that wait for a busy core take far longer."""
    task = models.Task("unet", lambda: models.UNet(2, 3, 4, 4, 1), (2, 3, 16, 16), 4, dense=True)
    monkeypatch.setitem(steps.TASKS, "cpu", (task,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield task
    torch.set_num_threads(threads)


def test_training_steps_are_timed_and_weighed(small_unet: models.Task) -> None:
    both = {steps.PLAIN, steps.OURS}
    rows = steps.measure(replace(TINY, dtypes=(torch.float32, torch.bfloat16)))
    assert [(row["dtype"], row["layout"], row["mode"]) for row in rows] == [
        ("float32", "contiguous", "eager"),
        ("bfloat16", "channels last", "eager"),
    ]
    for row in rows:
        assert_spreads(row["times_us"], both)
        assert_spreads(row["ratios"], {"nn.BatchNorm / ours"})
        for name in both:
            images_a_step = row["images_per_s"][name]["p50"] * row["times_us"][name]["p50"] / 1e6
            assert images_a_step == pytest.approx(2)
            assert row["steps_per_s"][name]["p50"] * 2 == pytest.approx(
                row["images_per_s"][name]["p50"]
            )
        # Beside what nn.BatchNorm keeps, ours keeps its message.
        more = row["saved_bytes"][steps.OURS] - row["saved_bytes"][steps.PLAIN]
        norms = [m for m in small_unet.make().modules() if isinstance(m, nn.BatchNorm2d)]
        assert more <= sum(8 * (4 * m.num_features + 1) for m in norms)
        assert row["saved_bytes"][steps.PLAIN] > 4 * 2 * 16 * 16 * 4
    assert steps.table(rows).count("| unet 2x3x16x16 |") == 4


def test_saved_bytes_are_counted_once_and_without_the_models_own() -> None:
    layer = nn.Linear(8, 8)
    input = torch.randn(4, 8)

    def step() -> None:
        hidden = layer(input)  # keeps its input, and the weight, which is the model's
        (hidden * hidden).sum().backward()  # keeps the same tensor twice

    assert steps.saved_bytes(step, layer) == 2 * input.nbytes


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A compiler that generates no kernels: where it would have kept them, each time."""
    compile, found = torch.compile, []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        return graph.forward

    def compile_without(function: Callable[..., Any], backend: str = "inductor") -> Any:
        return compile(function, backend=record if backend == "inductor" else backend)

    monkeypatch.setattr(torch, "compile", compile_without)
    return found


def test_compiled_steps_are_timed_beside_eager_ones_and_their_compilation(
    small_unet: models.Task, folders: list[str | None]
) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    both = {steps.PLAIN, steps.OURS}
    eager, compiled = steps.measure(replace(TINY, quick=False))
    assert (eager["mode"], compiled["mode"]) == ("eager", "compiled")
    assert eager["gains"] == {} and "graphs" not in eager
    assert_spreads(compiled["gains"], both)
    assert_spreads(compiled["first_step_s"], both)
    assert_spreads(compiled["first_step_ratios"], {"nn.BatchNorm / ours"})
    for what, count in (("graphs", 1), ("breaks", 0), ("again", 1)):
        assert compiled[what] == dict.fromkeys(both, count)
    # The compiler itself, each implementation in its turns, and the steps that are timed.
    cold = folders[1 : 1 + 2 * compilation.COMPILES]
    assert len(set(cold) - {before}) == len(cold)
    assert [folders[0], *folders[1 + len(cold) :]] == [before] * 3
    text = steps.table([eager, compiled])
    assert text.count("| unet 2x3x16x16 |") == 6
    assert "again" not in steps.table([eager]) and steps.bars([eager]) == []
    ((_, demanded, measured),) = steps.bars([eager, compiled])
    assert (demanded, measured) == ("1; 0; <= 1", "1; 0; 1")


class Broken(models.UNet):
    """One that the compiler sees in two halves."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        doubled = 2 * images
        torch._dynamo.graph_break()
        return super().forward(doubled)


def test_graphs_breaks_and_compilations_for_other_batches_are_counted(
    small_unet: models.Task, folders: list[str | None]
) -> None:
    broken = replace(small_unet, make=lambda: Broken(2, 3, 4, 4, 1))
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        found = compilation.compilation(broken, {"it": None}, torch.float32, CPU, turns=1)
    assert (found["breaks"], found["graphs"]) == ({"it": 1}, {"it": 2})
    assert found["again"] == {"it": 2 * 3}
    assert found["absent"] == found["first_step_ratios"] == {}


def test_what_does_not_run_is_absent_with_the_reason(
    small_unet: models.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module, backend: str) -> nn.Module:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", refuse)
    eager, compiled = steps.measure(replace(TINY, quick=False))
    assert eager["times_us"].keys() == {steps.PLAIN, steps.OURS}
    assert compiled["absent"][steps.OURS] == "RuntimeError: no compiler here"
    assert "first_step_s" not in compiled and steps.bars([eager, compiled]) == []
    assert "absent: RuntimeError: no compiler here" in steps.table([eager, compiled])
    monkeypatch.setitem(steps.TASKS, "cpu", (replace(small_unet, make=lambda: None),))
    (row,) = steps.measure(TINY)
    assert "absent: neither torchvision nor timm is installed" in steps.table([row])


@pytest.mark.parametrize("ours", [1.01, float("nan")])
def test_a_step_that_computes_another_loss_is_an_error(ours: float) -> None:
    steps._check_loss("net", {steps.PLAIN: 1.0, steps.OURS: 1.0 + 1e-5}, 1e-4)
    with pytest.raises(RuntimeError, match="net: expected the loss of nn.BatchNorm, 1.0"):
        steps._check_loss("net", {steps.PLAIN: 1.0, steps.OURS: ours}, 1e-4)


def test_a_quick_run_on_the_cpu_compiles_one_tiny_net() -> None:
    quick = replace(TINY, dtypes=tuple(steps.LOSS_TOLERANCE))
    compiled = [
        (task.name, dtype)
        for task in steps.TASKS["cpu"]
        for dtype in quick.dtypes
        if steps.COMPILED in steps._modes(task, dtype, quick)
    ]
    assert compiled == [("tiny unet", torch.float32)]


@pytest.mark.parametrize("quick", [False, True])
def test_modes_of_a_gpu(quick: bool) -> None:
    options = Options(torch.device("cuda", 0), quick=quick)
    modes = ["eager", "CUDA graph"] if quick else ["eager", "compiled", "CUDA graph"]
    task = steps.TASKS["cuda"][1]
    assert steps._modes(task, torch.float32, options) == modes
    assert steps._modes(task, torch.float32, replace(options, match="float32 CUDA")) == modes[-1:]
    assert steps._modes(task, torch.float32, replace(options, match="bfloat16")) == []


def first_losses(rank: int) -> list[float]:
    """Of one training step of each implementation, all over a group of this rank alone."""
    task = models.Task("unet", lambda: models.UNet(2, 3, 4, 4, 1), (2, 3, 16, 16), 4, dense=True)
    trained = []
    for kind in steps.KINDS.values():
        model = training.model_of(task, kind, torch.float32, CPU)
        step, _ = steps._prepared(task, model, torch.float32, CPU, steps.EAGER)
        trained.append(float(step()))
    return trained


def test_all_implementations_train_alike(run) -> None:
    ((plain, *others),) = run(1, first_losses)
    assert others == pytest.approx([plain, plain], rel=1e-4)


def test_what_the_compiler_gives_up_is_not_shared() -> None:
    nets = [models.UNet(2, 3, 4, 4, 1) for _ in range(2)]
    images = torch.randn(2, 3, 8, 8)
    expected = [net(images) for net in nets]
    codes = {training.with_code_of_its_own(net).forward.__code__ for net in nets}
    assert len(codes) == 2 and models.UNet.forward.__code__ not in codes
    for net, output in zip(nets, expected, strict=True):
        assert isinstance(net, models.UNet)
        torch.testing.assert_close(net(images), output)
