"""Debug mode: a layer tells its peers what it is about to do before it calls on them."""

from __future__ import annotations

import os
from datetime import timedelta

from syncbn_cuda import _collective


def set_debug(enabled: bool, timeout: timedelta | float | None = None) -> None:
    """Switches the check that all ranks are about to make the same collective, for this process.

    Where ranks do not come to the same layers in the same order, training hangs until a timeout
    that names no layer, or sums what does not belong together. With this check on, each layer tells
    its peers before each of its collectives, forward and backward, which layer it is (by its name
    in the model), its channels, its input's type, the direction, and whether gradients are
    recorded. Where ranks disagree, every one of them raises the same error at once: it names the
    ranks, what each was about to do, and what usually is the cause. So it is where a rank raises an
    error of its own in a forward: its peers are told. Where a rank does not come at all, as it is
    in another collective or has ended, the others raise at the timeout and name it, and the rank
    raises the same once it comes.

    Setting ``SYNCBN_DEBUG=1`` in the environment switches it on at import. Switch it on all ranks
    at the same point, before training.

    Args:
        enabled: whether to check from now on.
        timeout: how long to wait for the others, in seconds or as ``timedelta``; None for the
            timeout of the process group.

    Raises:
        ValueError: ``timeout`` is not positive.

    Note:
        Ranks talk through the store of their process group, so the check works whatever the backend
        or another collective is waiting for. It costs a few round trips to the store for each
        collective (a millisecond or so on one machine), no synchronisation with the device, and
        nothing while it is off. A group without a store is left alone.

        A rank that records no gradients, under ``torch.no_grad()`` say, beside some that do counts
        as a disagreement, as the others would wait for it in backward. A layer in evaluation makes
        no collective: it is found out by the next layer that synchronises, or at the timeout.

        What is compiled, traced or captured in a CUDA graph is not checked, so compile on all ranks
        or on none. The recompute of an activation checkpoint makes no collective.

    Example::

        >>> set_debug(True, timeout=60)
        >>> y = FastSyncBatchNorm(16)(torch.randn(2, 16, 8, 8))
        >>> set_debug(False)
    """
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if timeout is not None and not timeout > 0:
        raise ValueError(f"set_debug: expected timeout to be positive, got {timeout}")
    if not enabled:
        _collective.watch = None
        return
    from syncbn_cuda._agreement import Watch

    _collective.watch = Watch(timeout)


if os.environ.get("SYNCBN_DEBUG", "0") not in ("", "0"):
    set_debug(True)
