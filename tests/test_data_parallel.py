"""DataParallel cannot synchronise: its replicas say so once, and are batch norms of their own."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from inputs import random
from torch import nn

from syncbn_cuda import FastSyncBatchNorm, module

replication = importlib.import_module("torch.nn.parallel.replicate")


@pytest.fixture
def replicate(monkeypatch):
    """torch's own replication for DataParallel; only the copies stay on the device they are on."""

    def copies(tensors, devices, detach=False):
        return [[t.detach() if detach else t.clone() for t in tensors] for _ in devices]

    monkeypatch.setattr(replication, "_broadcast_coalesced_reshape", copies)
    module._warn_of_replicas.cache_clear()
    return lambda net: replication.replicate(net, [0, 1])


def test_replicas_warn_once_and_name_what_to_use(replicate):
    net = nn.Sequential(FastSyncBatchNorm(3), FastSyncBatchNorm(3))
    with pytest.warns(UserWarning, match="use DistributedDataParallel") as caught:
        replicate(net)
        replicate(net)
    assert len(caught) == 1


def test_each_replica_is_a_batch_norm_over_its_part(replicate):
    net, plain = nn.Sequential(FastSyncBatchNorm(3)).double(), nn.BatchNorm2d(3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicas = replicate(net)
    parts = [random((2, 3, 4, 4), torch.float64, mean=float(i)) for i in range(len(replicas))]
    for replica, x in zip(replicas, parts, strict=True):
        y, expected = replica(x), plain(x)
        torch.testing.assert_close(y, expected)
        y.pow(3).sum().backward()
        expected.pow(3).sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_layer_that_is_not_replicated_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FastSyncBatchNorm(3)(random((2, 3, 4, 4)))
