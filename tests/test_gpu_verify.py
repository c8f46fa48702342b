"""The health check on GPUs: its trial forward there, and ranks that share one."""

from __future__ import annotations

import gpu
import torch
from gpu import on_gpu, run  # noqa: F401
from test_verify_layers import converted, net

from syncbn_cuda import verify

pytestmark = gpu.MARKS


def report_rank(rank):
    report = verify(converted(net()))
    return report.findings, report.notes[-1]


def test_a_rank_with_a_gpu_of_its_own_is_well(run):  # noqa: F811
    ((findings, trial),) = run(1, report_rank)
    assert findings == [] and "the statistics are right" in trial


def test_ranks_that_share_a_gpu_are_found(run):  # noqa: F811
    first, second = run(2, report_rank)
    assert first == second
    shared = torch.cuda.device_count() < 2
    assert [finding.ranks for finding in first[0]] == [(0, 1)] * shared
    assert ("not made" in first[1]) == shared
