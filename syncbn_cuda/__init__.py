"""Synchronised batch norm for PyTorch: exact, fast, on CUDA and CPU."""

__version__ = "0.1.0"

from syncbn_cuda import functional
from syncbn_cuda._library import build_info, is_cuda_ext_available
from syncbn_cuda._registry import register_converter
from syncbn_cuda.convert import convert_sync_batchnorm, revert_sync_batchnorm
from syncbn_cuda.debug import set_debug
from syncbn_cuda.groups import sync_groups
from syncbn_cuda.health import Finding, HealthReport, VerificationError, verify
from syncbn_cuda.module import FastSyncBatchNorm
from syncbn_cuda.report import conversion_report, is_synchronized
from syncbn_cuda.running import recompute_running_stats, reduce_running_stats

__all__ = [
    "FastSyncBatchNorm",
    "Finding",
    "HealthReport",
    "VerificationError",
    "build_info",
    "conversion_report",
    "convert_sync_batchnorm",
    "functional",
    "is_cuda_ext_available",
    "is_synchronized",
    "recompute_running_stats",
    "reduce_running_stats",
    "register_converter",
    "revert_sync_batchnorm",
    "set_debug",
    "sync_groups",
    "verify",
]
