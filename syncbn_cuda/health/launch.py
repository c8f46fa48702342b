"""What is wrong with the launch: processes, devices, and wrappers of one process."""

from __future__ import annotations

from collections.abc import Sequence

from syncbn_cuda.health.facts import RankFacts
from syncbn_cuda.health.report import Finding


def shared_gpus(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns where ranks share a GPU, on which NCCL fails or hangs."""
    users: dict[str, list[int]] = {}
    for facts in ranks:
        for gpu in facts.gpus:
            users.setdefault(gpu, []).append(facts.rank)
    remedy = "torch.cuda.set_device(local_rank), model.cuda(), for each process its own GPU"
    return [
        Finding(f"{len(on)} ranks are on one GPU, {gpu}", (), tuple(on), remedy)
        for gpu, on in users.items()
        if len(on) > 1
    ]


def lonely(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns whether a process that was started with others knows of none."""
    facts = ranks[0]
    if facts.world > 1 or facts.launched is None or facts.launched[1] < 2:
        return []
    variable, started = facts.launched
    problem = (
        f"nothing is synchronised: {started} processes were started ({variable}={started}), and "
        "the world of this one has itself alone"
    )
    remedy = "call torch.distributed.init_process_group, with that world size, before the check"
    return [Finding(problem, (), (facts.rank,), remedy)]


def data_parallel(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns where threads of one process share a batch, which no group joins."""
    using = [facts for facts in ranks if facts.data_parallel]
    if not using:
        return []
    names = dict.fromkeys(name for facts in using for name in facts.data_parallel)
    problem = "nn.DataParallel: each device normalises over its own part of the batch"
    remedy = "use DistributedDataParallel, with one process for each device"
    return [Finding(problem, tuple(names), tuple(facts.rank for facts in using), remedy)]
