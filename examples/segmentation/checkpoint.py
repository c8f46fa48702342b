"""Checkpoints: whole or not at all, and enough in them to go on as if nothing had happened."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from segmentation.launch import Refusal, World
from segmentation.seeds import random_states, seed_everything, set_random_states


@dataclass
class Training:
    """All that changes in a training."""

    net: nn.Module  # without DistributedDataParallel, hence without "module." in its names
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    steps: int  # an epoch
    settings: dict[str, Any]  # what a checkpoint has to agree with
    #: Those of the run, which may differ from those of a checkpoint: what of them is told.
    arguments: dict[str, str] = field(default_factory=dict)
    epoch: int = 0  # how many are done
    best: float = -1.0  # mean IoU

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "settings": self.settings,
            "arguments": self.arguments,
            "epoch": self.epoch,
            "best": self.best,
        }

    def load(self, state: dict[str, Any]) -> None:
        rates = self.scheduler.base_lrs
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        # The schedule goes on as of now: with other ranks, batches or epochs than then, an epoch
        # may have another number of steps, and a step another rate.
        self.scheduler.base_lrs = rates
        self.scheduler.last_epoch = now = state["epoch"] * self.steps
        factors = [factor(now) for factor in self.scheduler.lr_lambdas]
        for group, rate, factor in zip(self.optimizer.param_groups, rates, factors, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * factor
        if state["scaler"]:  # empty where it was made without fp16
            self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.best = state["epoch"], state["best"]


def save(path: Path, training: Training, world: World) -> None:
    """Saves a checkpoint with the random states of every rank. A collective; rank 0 writes."""
    states: list | None = [None] * world.size if world.leads else None
    dist.gather_object(random_states(), states, dst=0)
    if world.leads:
        write(path, training.state() | {"random": states})


def write(path: Path, state: dict[str, Any]) -> None:
    """Writes a file that is either whole or what was there before, whenever the power fails."""
    unfinished = path.with_name(f".{path.name}.unfinished")  # on the same disk: a rename is atomic
    try:
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)


def find(out: Path, resume: str | None, world: World) -> Path | None:
    """Tells which checkpoint to go on from. Rank 0 looks for all."""

    def look() -> str | None:
        if out.exists() and not out.is_dir():
            raise Refusal(f"--out {out}: that is a file; give a folder")
        last = out / "checkpoint.pt"
        goes_on = resume == "auto" or (resume and Path(resume).resolve() == last.resolve())
        if not goes_on and last.exists():
            raise Refusal(
                f"--out {out}: there is a run already. Give --resume auto to go on with it, or "
                "another folder"
            )
        if resume == "auto":
            return str(last) if last.exists() else None
        return resume

    found = world.on_rank_0(look)
    return Path(found) if found else None


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--out {out}: cannot be made ({error.strerror})") from None


def differences(now: dict[str, str], before: dict[str, str]) -> str:
    """Tells which arguments are others than before, of those that both have."""
    told = [
        f"--{name.replace('_', '-')} {value} (was {before[name]})"
        for name, value in now.items()
        if before.get(name, value) != value
    ]
    return f" Other arguments than before: {', '.join(told)}." if told else ""


def read_best(path: Path, world: World) -> dict[str, Any] | None:
    """The best net so far, and what is told of it; None where there is none. A collective."""
    box = [path.read_bytes() if world.leads and path.exists() else b""]
    dist.broadcast_object_list(box, src=0)
    return _parse(box[0]) if box[0] else None


def resume(path: Path, training: Training, world: World, seed: int) -> str:
    """Goes on from a checkpoint. A collective; returns what to tell the user about it.

    Rank 0 reads the file for all, which on several machines may be the only one that has it.
    """
    box = [_read(path, training.settings) if world.leads else b""]
    dist.broadcast_object_list(box, src=0)
    state = _parse(box[0])
    ranks = len(state["random"])
    try:
        training.load(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise Refusal(f"--resume {path}: does not fit this net or optimizer: {error}") from None
    told = f"Going on from {path}, after epoch {training.epoch}."
    told += differences(training.arguments, state.get("arguments", {}))
    if ranks == world.size:
        set_random_states(state["random"][world.rank])
        return told
    seed_everything(seed, world.rank, training.epoch)
    return (
        f"{told} It was made by {ranks} ranks and there are {world.size}: random numbers begin "
        "anew, and the learning rate is that of the new batch."
    )


def _read(path: Path, settings: dict[str, Any]) -> bytes:
    """Returns what is in a file, once it is known to be a checkpoint that fits."""
    if not path.is_file():
        raise Refusal(f"--resume {path}: there is no such file")
    content = path.read_bytes()
    try:
        state = _parse(content)
        if "model" in state and "optimizer" not in state:
            raise Refusal(
                f"--resume {path}: that is the net alone; give the checkpoint.pt beside it"
            )
        made_with = state["settings"]
    except Refusal:
        raise
    except Exception as error:  # of many kinds, as it may be any file
        raise Refusal(f"--resume {path}: no checkpoint of this script ({error})") from None
    for name, value in settings.items():
        if made_with.get(name) != value:
            raise Refusal(
                f"--resume {path}: made with {name} = {made_with.get(name)}, and here it is "
                f"{value}. Resume with the data and arguments of that run, or start another one "
                "in another --out folder"
            )
    return content


def _parse(content: bytes) -> dict[str, Any]:
    # To the CPU first: else every tensor goes to the GPU it came from, on all ranks GPU 0.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
