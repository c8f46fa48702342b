"""Groups and DDP on GPUs: the tests of test_groups.py over Gloo and NCCL."""

from __future__ import annotations

import gpu
from gpu import on_gpu, run  # noqa: F401
from test_groups import (  # noqa: F401
    test_an_empty_head_under_ddp,
    test_ddp_trains_as_one_process_does,
    test_evaluation_makes_no_collective,
    test_groups_talk_among_themselves,
    test_how_many_messages_a_step_sends,
    test_ranks_that_need_different_gradients_do_not_hang,
    test_the_group_is_looked_up_at_each_forward,
)

pytestmark = gpu.MARKS
