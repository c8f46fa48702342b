"""Several ranks on GPUs are one batch, over Gloo and NCCL: tests of test_distributed.py."""

from __future__ import annotations

import gpu
from gpu import on_gpu, run  # noqa: F401
from test_distributed import (  # noqa: F401
    test_ranks_are_one_batch,
    test_ranks_are_one_batch_in_every_type,
)

pytestmark = gpu.MARKS
