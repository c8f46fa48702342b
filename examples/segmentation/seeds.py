"""Random numbers: the same weights on all ranks, other crops on each, and all of it again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(*parts: int) -> None:
    """Seeds Python, NumPy and torch from several numbers, as the seed of a run and a rank.

    A sum, the usual ``seed + rank``, would make rank 1 of a run the rank 0 of the next seed.
    """
    seed = mixed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of the CPU and all GPUs


def mixed(*parts: int) -> int:
    """One seed, of 63 bits, from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_worker(worker: int) -> None:
    """Seeds a worker of a DataLoader, which is called with ``generator=`` seeded by rank and epoch.

    Left alone, workers draw their seeds from the main process: where all ranks have one seed, so
    have their workers, and two images in a batch get the same augmentation.
    """
    seed_everything(torch.initial_seed(), worker)


def random_states() -> dict[str, Any]:
    """The states of all generators of this process, of types that a safe torch.load takes."""
    name, keys, *rest = np.random.get_state(legacy=True)
    on_gpu = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if on_gpu else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
