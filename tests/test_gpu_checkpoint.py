"""Activation checkpointing on a GPU, where backward has a thread of its own."""

from __future__ import annotations

import gpu
from gpu import on_gpu, run  # noqa: F401
from test_checkpoint import (  # noqa: F401
    test_a_graph_that_is_retained_recomputes_again,
    test_a_second_derivative,
    test_checkpoints_under_ddp,
    test_it_computes_what_it_does_without,
    test_ranks_exchange_each_message_once,
)
from test_checkpoint_forwards import (  # noqa: F401
    test_forwards_with_and_without_grad_in_a_region,
    test_other_forwards_are_forwards,
)

pytestmark = gpu.MARKS
