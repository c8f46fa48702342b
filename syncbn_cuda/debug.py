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
    in the model that runs), its channels, the direction, and whether gradients are recorded. Where
    ranks disagree, every one of them raises the same error at once: it names the ranks, what each
    was about to do, and what usually is the cause. So it is where a rank raises an error of its own
    in a forward: its peers are told. Where a rank does not come at all, as it is in another
    collective or has ended, the others raise at the timeout and name it, and the rank raises the
    same once it comes.

    Setting ``SYNCBN_DEBUG=1`` in the environment switches it on at import, with a timeout of
    ``SYNCBN_DEBUG_TIMEOUT`` seconds if that is set. Switch it on all ranks at the same point,
    before training.

    Args:
        enabled: whether to check from now on.
        timeout: how long to wait for the others, in seconds or as ``timedelta``; None for the
            timeout of the process group.

    Raises:
        ValueError: ``timeout`` is not positive.

    Note:
        Ranks talk through the store of their process group, so the check works whatever the backend
        or another collective is waiting for. It costs a few round trips to the store for each
        collective (about two milliseconds on one machine), no synchronisation with the device, and
        nothing while it is off. A group without a store is left alone. A rank that was killed is
        missed at the timeout, later than without this check where the backend sees it go at once.
        Where the rank that keeps the store hangs, the others raise five seconds after the timeout.

        The name of a layer is that in the outermost module whose methods run; a layer that is
        called outside of any is looked for among all modules of the process, so there all ranks
        have to hold it alike. Ranks whose names differ agree where the layer has the same place
        among the layers of its model. Models of a class, and layers without a name, are told apart
        by the order in which they were first used: two that a rank takes in another order from the
        beginning are not.

        A rank that records no gradients, under ``torch.no_grad()`` say, beside some that do counts
        as a disagreement, as the others would wait for it in backward. A layer in evaluation makes
        no collective: it is found out by the next layer that synchronises, or at the timeout.

        The peers of a rank that raises an error of its own in a layer's forward (ValueError,
        TypeError, RuntimeError) raise one that quotes it, even if that rank catches its own.

        What is compiled, traced or captured in a CUDA graph is not checked, so compile on all ranks
        or on none. Where one rank alone comes to the compiler's recompile limit it goes on without
        and waits in vain for the others, who raise nothing until the group's own timeout. The
        recompute of an activation checkpoint makes no collective.

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
    from syncbn_cuda._watch import Watch

    _collective.watch = Watch(timeout)


def _from_environment() -> None:
    if os.environ.get("SYNCBN_DEBUG", "").lower() in ("", "0", "false", "no", "off"):
        return
    seconds = os.environ.get("SYNCBN_DEBUG_TIMEOUT", "")
    try:
        set_debug(True, float(seconds) if seconds else None)
    except ValueError:
        raise ValueError(
            f"SYNCBN_DEBUG_TIMEOUT: expected a positive number of seconds, got {seconds!r}"
        ) from None


_from_environment()
