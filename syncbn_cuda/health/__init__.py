"""The health check before training: what is synchronised, over which ranks, and what is wrong."""

from __future__ import annotations

from typing import Any

from torch import nn

from syncbn_cuda._exchange import gather_or_raise, is_distributed
from syncbn_cuda.health.facts import rank_facts
from syncbn_cuda.health.launch import data_parallel, lonely, shared_gpus
from syncbn_cuda.health.layers import conflicts, layer_table, unsynchronised
from syncbn_cuda.health.loader import loader_facts, loader_findings, loader_note
from syncbn_cuda.health.report import Finding, HealthReport, LayerHealth, VerificationError
from syncbn_cuda.health.trial import try_groups

__all__ = ["Finding", "HealthReport", "LayerHealth", "VerificationError", "verify"]


def verify(
    model: nn.Module, loader: Any | None = None, *, raise_on_error: bool = False
) -> HealthReport:
    """Checks before training that all ranks normalise together, and over different data.

    A collective: every rank of the world calls it, after conversion and wrapping, in the mode that
    the model will train in. What the ranks have is compared: the layers and their settings, their
    groups, devices, the launch, and how the loader divides the data. Where nothing stands against
    it, a forward over each group, on batches that differ by rank, proves that all of its ranks
    get the same bits, and the right ones.

    Args:
        model: the model, wrapped or not. It is left as it is, its buffers and the random state too.
        loader: the ``DataLoader`` to train with, if it is to be checked. No sample is loaded.
        raise_on_error: whether to raise where anything is found.

    Returns:
        A :class:`HealthReport`, the same on every rank: ``findings``, an empty list when all is
        well, each with its problem, layers, ranks and remedy; ``layers``, each layer that
        normalises, with the ranks it does so over and why; ``notes``. Its ``str`` is a table.

    Raises:
        VerificationError: ``raise_on_error`` is set and there are findings; on all ranks.
        RuntimeError: another rank raised something as it looked at its model or loader.

    Warns:
        UserWarning: later, from rank 0: a second epoch has begun and the loader's shuffling
            ``DistributedSampler`` was never given its epoch. Until ``set_epoch`` is called, its
            ``epoch`` is a number that counts; a later ``verify`` makes a finding of it. (Of a
            sampler that is made anew for each epoch nothing is seen.)

    Note:
        A plain batch norm beside synchronised ones is no finding, as conversion can select, nor one
        that is frozen on every rank; one that trains and that conversion would not take is. Of
        torch's and apex's SyncBatchNorm, groups and settings are compared, and no trial is made.

        A loader is not judged where its sampler, or its iterable dataset, is the user's own. A
        dataset of the user's own that divides itself by rank is known from its length, and from
        what it holds: torch's datasets, and lists of an entry a sample, such as names of files.

    Example::

        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> report = verify(model)
        >>> report.findings
        []
        >>> print(report)
        1  FastSyncBatchNorm  a world of one  from BatchNorm2d
        ranks: this process alone
        loader: none given
        trial forward: 1 for 1 layers, on data that differ by rank: the statistics are right, ...
        nothing found
    """
    told = gather_or_raise(
        "verify", lambda: rank_facts(model, None if loader is None else loader_facts(loader))
    )
    ranks = list(told.values())
    unsafe = [*conflicts(ranks), *shared_gpus(ranks)]
    findings = [
        *lonely(ranks),
        *unsynchronised(ranks),
        *unsafe,
        *data_parallel(ranks),
        *loader_findings(ranks),
    ]
    failures: list[Finding] = []
    trial = "not made, as ranks could hang in it or disagree"
    if not unsafe:
        failures, trial = try_groups(ranks, model)
    world = f"ranks: {len(ranks)}" if is_distributed() else "ranks: this process alone"
    report = HealthReport(
        [*findings, *failures],
        layer_table(ranks),
        [world, loader_note(ranks), f"trial forward: {trial}"],
    )
    if raise_on_error and report.findings:
        raise VerificationError(report)
    return report
