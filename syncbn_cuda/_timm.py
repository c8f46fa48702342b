"""Converters for timm's batch norms; imported where timm is in use already."""

from __future__ import annotations

from timm.layers import BatchNormAct2d, SplitBatchNorm2d, SyncBatchNormAct
from torch import Tensor

from syncbn_cuda._registry import register_converter
from syncbn_cuda.module import FastSyncBatchNorm


@register_converter(SyncBatchNormAct)
@register_converter(BatchNormAct2d)
class FastSyncBatchNormAct2d(BatchNormAct2d, FastSyncBatchNorm):
    """Batch norm, drop and activation; a ``BatchNormAct2d`` to timm's own tools."""

    def forward(self, x: Tensor) -> Tensor:
        x = FastSyncBatchNorm.forward(self, x)
        for name in ("drop", "act"):  # a SyncBatchNormAct that timm did not convert has neither
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


@register_converter(SplitBatchNorm2d)
class FastSyncSplitBatchNorm2d(SplitBatchNorm2d, FastSyncBatchNorm):
    """Synchronises the first part of the batch; the other parts' layers are converted like any."""
