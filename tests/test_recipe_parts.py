"""The parts of the training recipe: what each of them promises, also over ranks."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from optional import optional
from scripts import example, needs
from test_recipe import RECIPE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm, is_synchronized

pytestmark = needs(RECIPE)

for package in ("sklearn", "tqdm"):
    optional(package)

CPU = torch.device("cpu")


def world(rank: int, size: int):
    return example("segmentation.launch").World(rank, size, CPU, store=None)


# Evaluation


def labelled(rank: int, ranks: int, pages: int):
    """What a net that is the same everywhere makes of one rank's share of some pages."""
    data, evaluation = example("segmentation.data"), example("segmentation.evaluation")
    torch.manual_seed(0)
    net = example("unet").UNet(11)
    held_out = data.Whole(data.DigitPages(train=False, count=pages), multiple=4)
    share = evaluation.share(pages, world(rank, ranks))
    return evaluation.evaluate(net, held_out, share, classes=11, device=CPU)


def evaluate_together(rank: int, pages: int):
    evaluation = example("segmentation.evaluation")
    ranks = dist.get_world_size()
    confusion, mine = labelled(rank, ranks, pages)
    dist.all_reduce(confusion)
    gathered = evaluation.gather_predictions(mine, world(rank, ranks))
    return confusion.numpy(), len(mine), gathered and [each.numpy() for each in gathered]


@pytest.mark.parametrize(("ranks", "pages"), ((2, 7), (4, 9), (4, 2)))
def test_sharded_evaluation_is_that_of_one_process_exactly(run, ranks, pages) -> None:
    expected, predictions = labelled(0, 1, pages)
    answers = run(ranks, evaluate_together, pages)
    assert sum(count for _, count, _ in answers) == pages  # none twice
    for confusion, _, _ in answers:
        assert confusion.dtype == np.int64
        assert (confusion == expected.numpy()).all()
    gathered = answers[0][2]
    assert len(gathered) == pages
    for found, wanted in zip(gathered, predictions, strict=True):  # in the order of the dataset
        assert (found == wanted.numpy()).all()
    assert all(others is None for _, _, others in answers[1:])


def test_mean_iou_leaves_out_classes_that_do_not_occur() -> None:
    confusion = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    evaluation = example("segmentation.evaluation")
    ious = evaluation.class_ious(confusion)
    assert ious == [3 / 4, 4 / 5, None]
    assert evaluation.mean_iou(ious) == (3 / 4 + 4 / 5) / 2


def test_an_evaluation_of_nothing_is_refused() -> None:
    evaluation, launch = example("segmentation.evaluation"), example("segmentation.launch")
    with pytest.raises(launch.Refusal, match="no pixel of the images to evaluate on has a class"):
        evaluation.class_ious(torch.zeros(3, 3, dtype=torch.int64))


# Gradients


def batches_of(rank: int, count: int) -> list:
    """Micro-batches with unequally many pixels that are no class."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(count):
        images = torch.randn(2, 1, 8, 8, generator=generator, dtype=torch.float64)
        masks = torch.randint(3, (2, 8, 8), generator=generator)
        masks[:, : 2 * number + rank] = 255
        found.append((images, masks))
    return found


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(1, 3, 3, padding=1).double()


def gradients_of(rank: int, count: int) -> tuple[list, float]:
    step = example("segmentation.step")
    ranks = dist.get_world_size()
    model = DistributedDataParallel(convolution())
    batches = batches_of(rank, count)
    pixels = step.count_pixels(batches, CPU)
    loss = step.backward(model, batches, pixels, ranks, device=CPU)
    dist.all_reduce(loss)
    return [parameter.grad.numpy() for parameter in model.parameters()], loss.item()


@pytest.mark.parametrize(("ranks", "count"), ((1, 3), (2, 1), (2, 3)))
def test_accumulated_gradients_are_those_of_one_batch(run, ranks, count) -> None:
    together = [batch for rank in range(ranks) for batch in batches_of(rank, count)]
    images, masks = (torch.cat(parts) for parts in zip(*together, strict=True))
    net = convolution()
    loss = nn.functional.cross_entropy(net(images), masks, ignore_index=255)
    loss.backward()
    for gradients, found in run(ranks, gradients_of, count):
        # The loss is computed in float32: some roundings of 6e-8 in what is of the order of 1.
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for gradient, parameter in zip(gradients, net.parameters(), strict=True):
            np.testing.assert_allclose(gradient, parameter.grad, rtol=1e-6, atol=1e-6)


def test_what_is_left_over_makes_a_step_as_well() -> None:
    groups = example("segmentation.step").in_groups(iter(range(7)), 3)
    assert list(groups) == [[0, 1, 2], [3, 4, 5], [6]]


# Learning rate


@pytest.mark.parametrize(("rule", "factor"), (("linear", 4), ("sqrt", 2), ("none", 1)))
def test_the_rate_grows_with_the_batch_by_the_rule(rule, factor) -> None:
    rate = example("segmentation.step").scaled_rate(0.1, rule, batch=64, base_batch=16)
    assert rate == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("decay", ("cosine", "poly"))
@pytest.mark.parametrize("warmup", (0, 5))
def test_the_rate_rises_then_falls_to_nothing(decay, warmup) -> None:
    factor = example("segmentation.step").rate_schedule(20, warmup, decay)
    rates = [factor(step) for step in range(21)]
    assert rates.index(max(rates)) == warmup
    assert max(rates) == 1
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert min(rates) > 0 or rates.index(min(rates)) == 20
    assert rates[-1] == pytest.approx(0)


# Random numbers and the order of samples


class Draws(torch.utils.data.Dataset):
    """Tells which sample was asked for, and a number from each generator."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[int, int, float, float]:
        return index, int(torch.randint(2**60, ())), random.random(), np.random.random()


def drawn(rank: int, epoch: int, workers: int) -> list[torch.Tensor]:
    loader = example("segmentation.data").TrainingLoader(
        Draws(), world(rank, 2), batch=2, workers=workers, seed=3
    )
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader) == 4
    return [torch.cat(column) for column in zip(*batches, strict=True)]


def test_ranks_workers_and_epochs_draw_numbers_of_their_own() -> None:
    calls = [(rank, epoch) for rank in range(2) for epoch in range(2)]
    for generator in (1, 2, 3):
        numbers = torch.cat([drawn(*call, workers=2)[generator] for call in calls])
        assert len(numbers.unique()) == len(numbers) == 32
    again = drawn(1, 1, workers=2)
    for first, second in zip(again, drawn(1, 1, workers=2), strict=True):
        assert first.equal(second)


def test_each_epoch_has_its_order_and_no_sample_twice() -> None:
    epochs = []
    for epoch in range(2):
        seen = torch.cat([drawn(rank, epoch, workers=0)[0] for rank in range(2)])
        assert len(seen.unique()) == len(seen) == 16  # of 18, as 9 do not make batches of 2
        epochs.append(seen.tolist())
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("ranks", "batch", "message"),
    (
        (2, 10, "a rank has 9 training images, too few for one batch of 10"),
        (10, 2, "a rank has 1 training image, too few for one batch of 2"),
        (19, 1, "there are 18 training images for 19 ranks: start fewer ranks"),
    ),
)
def test_too_few_images_for_a_batch_are_refused(ranks, batch, message) -> None:
    data, launch = example("segmentation.data"), example("segmentation.launch")
    with pytest.raises(launch.Refusal, match=message):
        data.TrainingLoader(Draws(), world(0, ranks), batch=batch, workers=0, seed=0)


# Batch norm


def recipe_of(rank: int, out: str, sync_bn: str) -> dict:
    """What a recipe starts from."""
    options = example("segmentation.options")
    arguments = ("--pages", "16", "--batch", "4", "--out", f"{out}/{sync_bn}")
    args = options.parse_arguments([*arguments, "--sync-bn", sync_bn], multiple=4)
    size = dist.get_world_size()
    # World.on_rank_0 needs a store, and what it does here is done on every rank as well.
    alone = SimpleNamespace(
        rank=rank, size=size, device=CPU, leads=rank == 0, on_rank_0=lambda function: function()
    )
    recipe = example("train_segmentation").Recipe(args, alone)
    layers = [layer for layer in recipe.net.modules() if "BatchNorm" in type(layer).__name__]
    groups = {
        tuple(dist.get_process_group_ranks(layer.process_group or dist.group.WORLD))
        for layer in layers
        if is_synchronized(layer)
    }
    return {
        "types": {type(layer) for layer in layers},
        "groups": groups,
        "start": [value.numpy() for value in recipe.net.state_dict().values()],
        "names": list(recipe.net.state_dict()),
        "batch": [part.numpy() for part in next(recipe.loader.epoch(0))],
        "rate": recipe.training.optimizer.param_groups[0]["lr"],
    }


@pytest.mark.parametrize(
    ("sync_bn", "layer", "groups"),
    (
        ("on", FastSyncBatchNorm, [{(0, 1)}] * 2),
        ("group:2", FastSyncBatchNorm, [{(0, 1)}] * 2 + [{(2, 3)}] * 2),
    ),
)
def test_with_or_without_synchronised_statistics_all_else_is_the_same(
    run, sync_bn, layer, groups, tmp_path
) -> None:
    answers = run(len(groups), recipe_of, str(tmp_path), sync_bn)
    plain = run(len(groups), recipe_of, str(tmp_path), "off")
    assert [answer["groups"] for answer in answers] == groups
    for answer, other in zip(answers, plain, strict=True):
        assert (answer["types"], other["types"]) == ({layer}, {nn.BatchNorm2d})
        for what in ("rate", "names"):
            assert answer[what] == other[what]
        for what in ("start", "batch"):
            assert all(map(np.array_equal, answer[what], other[what]))


# Arguments


def test_the_help_says_how_to_train_on_a_folder_and_what_it_looks_like(capsys) -> None:
    with contextlib.suppress(SystemExit):
        example("segmentation.options").parse_arguments(["--help"], multiple=4)
    told = capsys.readouterr().out
    for needed in ("--data DIR", "DIR/train/images/NAME.jpg", "255 is no class", "--resume auto"):
        assert needed in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--sync-bn", "group:0"), "expected on, off or group:N, got group:0"),
        (("--sync-bn", "group:1"), "group:1 is each rank by itself: give off for that"),
        (("--crop", "42"), "expected a multiple of 4, got 42"),
        (("--batch", "0"), "expected at least 1, got 0"),
        (("--lr", "0"), "expected more than 0, got 0"),
        (("--epochs", "many"), "invalid int value: 'many'"),
        (("--val-fraction", "1"), "expected less than 1, got 1.0"),
    ),
)
def test_an_argument_that_makes_no_sense_is_refused(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        example("segmentation.options").parse_arguments(arguments, multiple=4)
    assert message in capsys.readouterr().err
