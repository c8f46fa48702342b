"""Latency and bandwidth of a collective, from what it takes over several ranks and sizes.

A collective of so many steps, in which each rank sends so many bytes, takes about ``alpha steps +
beta bytes`` (Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """The two parameters, and how far each time is from what they say.

    Args:
        alpha_us: microseconds a step.
        beta_us: microseconds a byte; 0 where the times do not tell it from none.
        residuals: of each time, relative: (measured - fitted) / measured.
    """

    alpha_us: float
    beta_us: float
    residuals: tuple[float, ...]

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    @property
    def gigabytes_s(self) -> float:
        return 1e-3 / self.beta_us if self.beta_us else float("inf")


def fit(steps: list[int], sent: list[int], times_us: list[float]) -> Fit:
    """Fits both by least squares.

    Neither is negative: where the best one is, it is 0 and the other is fitted alone.
    """
    times = np.array(times_us)
    both = np.stack([steps, sent], axis=1).astype(float)
    scale = both.max(axis=0)  # steps are few and bytes many
    solution = np.zeros(2)
    free = [0, 1]
    while free:
        solution[:] = 0
        solution[free] = np.linalg.lstsq((both / scale)[:, free], times, rcond=None)[0]
        free = [i for i in free if solution[i] > 0]
        if np.count_nonzero(solution) == len(free):
            break
    alpha, beta = (solution / scale).tolist()
    return Fit(alpha, beta, tuple((1 - both @ [alpha, beta] / times).tolist()))
