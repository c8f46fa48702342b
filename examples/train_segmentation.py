"""Trains a net that labels every pixel, on one GPU, on many, on many machines, or on the CPU.

    torchrun --standalone --nproc-per-node 2 examples/train_segmentation.py

trains on pages of handwritten digits within a minute; --help tells how to train on a folder of your
own images. The script is there to be copied, together with unet.py and the folder segmentation/,
whose files are the parts of it:

    launch.py      how ranks begin and end        step.py        the gradients of one step
    data.py        samples, crops, the loader     evaluation.py  mean IoU over all ranks
    folder.py      a folder of images and masks   checkpoint.py  saving and going on
    masks.py       masks, read and written        clock.py       where the time goes
    seeds.py       random numbers                 log.py         what rank 0 tells
    options.py     the arguments

Put your own net in the place of UNet. It is made as Net(classes, channels=...), and of images
(N, channels, H, W) makes logits (N, classes, H, W). H and W are multiples of Net.multiple, or of 32
where it does not say. predict_segmentation.py labels images with what was trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import convert_sync_batchnorm, sync_groups, verify

try:
    from segmentation import checkpoint, evaluation, folder, launch, masks
    from segmentation.clock import Clock
    from segmentation.data import Crops, DigitPages, Samples, TrainingLoader, Whole
    from segmentation.launch import Refusal, World
    from segmentation.log import Log, counted
    from segmentation.options import parse_arguments
    from segmentation.seeds import seed_everything
    from segmentation.step import (
        backward,
        count_pixels,
        in_groups,
        rate_schedule,
        scaled_rate,
        step_alone,
        warm_up,
    )
    from tqdm import tqdm
    from unet import UNet
except ModuleNotFoundError as error:
    sys.exit(f"This example needs {error.name}: pip install numpy scikit-learn pillow tqdm")

#: Of which the sides of what the net is given are multiples.
MULTIPLE: int = getattr(UNet, "multiple", 32)


def load_samples(args: argparse.Namespace, world: World, log: Log) -> tuple[Samples, Samples]:
    """The samples to train on and those to evaluate on."""
    if args.data is None:
        return DigitPages(True, args.pages), DigitPages(False, max(1, args.pages // 4))
    return folder.load(args, world, log)


def group_of(ranks: int | str) -> dist.ProcessGroup | None:
    """Those to normalise with: some ranks in a row, or all."""
    try:
        return None if ranks == "on" else sync_groups(ranks)
    except ValueError as error:
        raise Refusal(f"--sync-bn group:{ranks}: {error}") from None


class Recipe:
    """A training: its parts, and its epochs."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world, device = args, world, world.device
        self.resume_from = checkpoint.find(args.out, args.resume, world)
        self.log = Log(args.out / "log.jsonl", world)
        torch.use_deterministic_algorithms(args.deterministic, warn_only=True)

        samples, self.held_out = load_samples(args, world, self.log)
        world.on_rank_0(lambda: checkpoint.make_folder(args.out))
        self.classes, channels = samples.classes, samples.channels
        flip = args.data is not None and not args.no_flip  # a mirrored 2 is no 2
        self.loader = TrainingLoader(
            Crops(samples, args.crop, flip),
            world,
            batch=args.batch,
            workers=args.workers,
            seed=args.seed,
        )

        seed_everything(args.seed)  # the same weights on all ranks
        net: nn.Module = UNet(self.classes, channels=channels)
        if args.sync_bn != "off":
            net = convert_sync_batchnorm(net, group_of(args.sync_bn))
        self.net = net.to(device)
        self.model = DistributedDataParallel(
            self.net, device_ids=[device.index] if device.type == "cuda" else None
        )
        seed_everything(args.seed, world.rank)  # from here on each rank draws its own numbers

        batch = world.size * args.batch * args.accumulate  # of a step, which decides on the rate
        rate = scaled_rate(args.lr, args.lr_scale, batch, args.base_batch)
        self.steps = -(-len(self.loader) // args.accumulate)  # the last takes what is left over
        optimizer = torch.optim.AdamW(self.net.parameters(), rate, weight_decay=args.weight_decay)
        schedule = rate_schedule(
            args.epochs * self.steps, round(args.warmup * self.steps), args.decay
        )
        fp16 = args.amp == "fp16"  # whose range is too small for gradients that are not scaled
        self.training = checkpoint.Training(
            self.net,
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
            torch.amp.GradScaler(device.type, enabled=fp16 and device.type == "cuda"),
            steps=self.steps,
            settings={"classes": self.classes, "channels": channels},
            arguments={
                name: str(value)
                for name, value in vars(args).items()
                if name not in ("out", "resume")
            },
        )
        precision = torch.float16 if fp16 else torch.bfloat16
        autocast = partial(torch.autocast, device.type, precision, enabled=args.amp != "off")
        self.how = {"device": device, "autocast": autocast}  # to compute
        self.clock = Clock(world)
        # To measure with. Only this rank takes part in making it.
        self.alone = dist.new_group([world.rank], use_local_synchronization=True)

    def run(self) -> None:
        """Trains the epochs that are left."""
        args, world, training = self.args, self.world, self.training
        self.log.say(
            f"{counted(world.size, 'rank')} on {world.device.type}, "
            f"{counted(len(self.loader.sampler), 'image')} a rank, "
            f"{counted(self.classes, 'class')}, {counted(self.steps, 'step')} an epoch"
        )
        shape = (args.batch, training.settings["channels"], args.crop, args.crop)
        self.check()
        warm_up(self.model, shape, **self.how)
        here = 0  # epochs whose log is in this folder
        if self.resume_from:
            self.log.say(checkpoint.resume(self.resume_from, training, world, args.seed))
            if self.resume_from.resolve() == (args.out / "checkpoint.pt").resolve():
                here = training.epoch
            else:
                training.best = -1.0  # the net that had it is in another folder
        self.log.begin(here)
        if training.epoch >= args.epochs:
            done = counted(training.epoch, "epoch")
            self.log.say(f"Nothing is left to train: after {done}, with --epochs {args.epochs}.")
        while training.epoch < args.epochs:
            self.train_epoch(training.epoch)
            ious = self.evaluate()
            score = evaluation.mean_iou(ious)
            training.epoch += 1
            self.log.say(
                f"epoch {training.epoch}/{args.epochs}: mean IoU {score:.4f}",
                epoch=training.epoch,
                mean_iou=score,
                ious=ious,
            )
            self.save(ious)
        self.finish()

    def check(self) -> None:
        """Refuses to train where net or ranks are not as they should be. A collective."""
        self.label(range(1))  # else a net that does not fit would fail after a whole epoch
        if self.args.sync_bn == "off":
            return  # as asked for
        report = verify(self.model, self.loader.loader)  # the same on all ranks
        if report.findings:
            raise Refusal(f"the health check found something:\n{report}")

    def train_epoch(self, epoch: int) -> None:
        args, training, device = self.args, self.training, self.world.device
        self.model.train()
        loss = torch.zeros((), device=device)
        self.clock.restart()
        batches = self.clock.waiting_for(self.loader.epoch(epoch))
        with self.log.bar(f"epoch {epoch + 1}/{args.epochs}", self.steps) as bar:
            for step, group in enumerate(in_groups(batches, args.accumulate), start=1):
                rate = training.optimizer.param_groups[0]["lr"]
                pixels = count_pixels(group, device)
                loss += backward(
                    self.model, group, pixels, self.world.size, scaler=training.scaler, **self.how
                )
                training.scaler.step(training.optimizer)
                training.scaler.update()
                training.optimizer.zero_grad()
                training.scheduler.step()
                self.clock.steps += 1
                bar.update()
                # An epoch with fewer steps has one report, at its end.
                if args.log_every and step % min(args.log_every, self.steps) == 0:
                    self.report(bar, group, epoch=epoch + 1, step=step, rate=rate, loss=loss)
                    loss.zero_()

    def report(
        self, bar: tqdm, batches: list, *, epoch: int, step: int, rate: float, loss: torch.Tensor
    ) -> None:
        """Tells how training goes since the last report. A collective."""
        clock = self.clock
        images = self.args.batch * self.world.size * clock.batches / clock.steps  # a step
        alone = partial(
            step_alone, self.net, self.training.optimizer, self.alone, batches, **self.how
        )
        split, mean_loss = clock.report(alone, len(batches), loss / clock.steps)
        images_s = 1e3 * images / split.step
        bar.set_postfix_str(f"loss {mean_loss:.3f}, {images_s:.0f} images/s", refresh=False)
        self.log.say(
            f"epoch {epoch} step {step}: loss {mean_loss:.4f}, rate {rate:.2g}, "
            f"{images_s:.0f} images/s, {split}",
            epoch=epoch,
            step=step,
            loss=mean_loss,
            rate=rate,
            images_s=images_s,
            ms=split.numbers(),
        )

    def label(self, which: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Labels samples that are held out; on this rank alone, so not through self.model."""
        return evaluation.evaluate(
            self.net,
            Whole(self.held_out, MULTIPLE),
            which,
            classes=self.classes,
            workers=self.args.workers if len(which) > 1 else 0,
            **self.how,
        )

    def evaluate(self) -> list[float | None]:
        """The IoU of each class, the same on all ranks."""
        every = range(len(self.held_out))
        if self.args.eval == "rank0":
            found = self.world.on_rank_0(lambda: self.label(every)[0].tolist())
            return evaluation.class_ious(torch.tensor(found))
        evaluation.share_buffers(self.net)
        confusion, _ = self.label(evaluation.share(len(every), self.world))
        dist.all_reduce(confusion)  # whole numbers: exact, in whatever order
        return evaluation.class_ious(confusion)

    def save(self, ious: list[float | None]) -> None:
        """Writes the checkpoint of an epoch, and the net if it is the best so far."""
        training, world, out = self.training, self.world, self.args.out
        if (score := evaluation.mean_iou(ious)) > training.best:
            training.best = score
            if world.leads:  # before the checkpoint that says so: a run may end between the two
                told = {"mean_iou": score, "ious": ious, "epoch": training.epoch}
                best = {"model": self.net.state_dict(), **told, **training.settings}
                checkpoint.write(out / "best.pt", best)
        checkpoint.save(out / "checkpoint.pt", training, world)
        world.advice = (
            f"The checkpoint of epoch {training.epoch} is whole; to go on from it, give the same "
            "arguments and --resume auto"
        )

    def finish(self) -> None:
        """Tells how good the best net of this folder is, and what it predicts. A collective."""
        best = checkpoint.read_best(self.args.out / "best.pt", self.world)
        if best:
            ious = ", ".join(
                f"{name}: {'-' if iou is None else f'{iou:.3f}'}"
                for name, iou in enumerate(best["ious"])
            )
            self.log.say(f"IoU of each class in epoch {best['epoch']}: {ious}")
            self.log.say(f"Best mean IoU {best['mean_iou']:.4f}, in {self.args.out / 'best.pt'}")
            self.net.load_state_dict(best["model"])
        if self.args.predictions:
            self.write_predictions()

    def write_predictions(self) -> None:
        """Labels what is held out with the net as it is. A collective."""
        evaluation.share_buffers(self.net)
        _, mine = self.label(evaluation.share(len(self.held_out), self.world))
        predictions = evaluation.gather_predictions(mine, self.world)
        if predictions is not None:
            labels = self.args.out / "predictions"
            labels.mkdir(exist_ok=True)
            for name, mask in zip(self.held_out.names, predictions, strict=True):
                masks.write_mask(labels / f"{name}.png", mask.numpy())


def main() -> None:
    args = parse_arguments(multiple=MULTIPLE)
    launch.run(lambda world: Recipe(args, world).run(), args.timeout)


if __name__ == "__main__":
    main()
