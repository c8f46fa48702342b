"""A rank that dies, raises or stalls: the others end soon, name the layer, and tear no buffer."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import threading
import time
from collections import OrderedDict
from functools import partial

import pytest
import torch
from inputs import random
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm
from syncbn_cuda._exchange import gather

#: Seconds: the timeout of the process group, and what may pass beyond it until a process is gone.
PATIENCE, MARGIN = 5.0, 10.0
VICTIM = 1
CHANNELS = 6
BLOCKS = ("stem", "body", "head")
NAMED = re.compile(
    rf"FastSyncBatchNorm\({CHANNELS}\) at '(\w+)\.norm': the all_reduce of its (\w+) over ranks "
    r"([\d, -]+) \(.*gloo.*\) failed: \S"
)


def network():
    """Three layers, so that one comes before and one after that in which ranks are lost."""

    def block(channels):
        convolution = nn.Conv2d(channels, CHANNELS, 3, padding=1)
        return nn.Sequential(
            OrderedDict(conv=convolution, norm=FastSyncBatchNorm(CHANNELS), relu=nn.ReLU())
        )

    return nn.Sequential(
        OrderedDict((name, block(3 if name == "stem" else CHANNELS)) for name in BLOCKS)
    )


def train_once(model, batch):
    """A step of training: gradients alone, so that twins of a net stay twins."""
    model(batch).square().mean().backward()


def end_by(number, *_):
    os.kill(os.getpid(), number)


def end_in_the_collective(*_):
    """The others come to it later."""
    threading.Timer(0.5, end_by, (signal.SIGKILL,)).start()


def run_out_of_memory(*_):
    raise torch.OutOfMemoryError("planted")


def lose_a_channel(_, inputs):
    return inputs[0][:, 1:]


WAYS = {
    "killed": partial(end_by, signal.SIGKILL),
    "killed in the collective": end_in_the_collective,
    "stalled": partial(end_by, signal.SIGSTOP),
    "out of memory": run_out_of_memory,
    "wrong input": lose_a_channel,
}


def wait_for_the_end_of(process, *_):
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.01)


def plant(net, place, befall):
    """Arranges for what befalls a rank at its next forward of the middle layer, or backward."""
    if place == "forward":
        net.body.norm.register_forward_pre_hook(befall)
    elif place == "backward":
        net.body.norm.register_full_backward_pre_hook(befall)
    else:
        befall()


def buffers_of(net):
    """A copy of the buffers of each layer, as bits."""
    return [
        [buffer.numpy().tobytes() for buffer in getattr(net, block).norm.buffers()]
        for block in BLOCKS
    ]


def lose_a_rank(rank, way, place, wraps):
    """Trains two steps and, in the second, loses a rank; a twin of the net has had both before.

    Returns:
        What was raised, when the step began, whether the buffers of each layer are those before or
        after the step, and the processes of all ranks.
    """
    processes = gather(os.getpid())
    torch.manual_seed(0)
    twin = network()
    net = copy.deepcopy(twin)
    undisturbed, model = map(DistributedDataParallel, (twin, net)) if wraps else (twin, net)
    torch.manual_seed(1 + rank)
    first, second = (random((2, 3, 5, 7), mean=step) for step in range(2))
    train_once(undisturbed, first)
    before = buffers_of(twin)
    train_once(undisturbed, second)
    after = buffers_of(twin)
    assert not set(sum(before, [])) & set(sum(after, []))
    train_once(model, first)
    assert buffers_of(net) == before

    began = time.monotonic()
    if rank == VICTIM:
        plant(net, place, WAYS[way])
    elif way == "killed in the collective":
        plant(net, place, partial(wait_for_the_end_of, processes[VICTIM]))
    try:
        train_once(model, second)
    except RuntimeError as error:
        if rank == VICTIM:
            raise
        states = [
            "old" if now == old else "new" if now == new else "torn"
            for now, old, new in zip(buffers_of(net), before, after, strict=True)
        ]
        return str(error), began, states, processes
    raise AssertionError("a step without a rank")


#: Every way and place with 2 and 4 ranks, and by itself and under DDP, but not all of them at once.
CASES = [
    ("killed", "forward", 2, "alone"),
    ("killed", "backward", 4, "alone"),
    ("killed", "between", 4, "DDP"),
    ("killed in the collective", "forward", 4, "DDP"),
    ("killed in the collective", "backward", 2, "alone"),
    ("stalled", "forward", 2, "DDP"),
    ("stalled", "backward", 4, "DDP"),
    ("stalled", "between", 2, "alone"),
    ("out of memory", "forward", 4, "alone"),
    ("out of memory", "backward", 2, "DDP"),
    ("out of memory", "between", 4, "alone"),
    ("wrong input", "forward", 2, "alone"),
]
RAISED = {
    "out of memory": "OutOfMemoryError: planted",
    "wrong input": "ValueError: FastSyncBatchNorm(6): expected input with 6 channels",
}


@pytest.mark.parametrize(("way", "place", "world", "wraps"), CASES)
def test_the_others_end_in_time_and_name_the_layer(way, place, world, wraps, run):
    in_ddp = wraps == "DDP"
    answers = run(world, lose_a_rank, way, place, in_ddp, patience=PATIENCE, casualties=[VICTIM])
    ended = time.monotonic()
    raised = answers.pop(VICTIM)
    assert RAISED[way] in raised if way in RAISED else raised is None
    for text, began, states, processes in answers:
        assert ended - began < PATIENCE + MARGIN
        for process in processes:
            with pytest.raises(ProcessLookupError):  # a zombie would be found
                os.kill(process, 0)

        named = NAMED.match(text)
        if named is None:
            # A forward in DDP begins with its own broadcast of buffers, in which it ends.
            assert (place, in_ddp) == ("between", True)
            assert states == ["old"] * 3
            continue
        block, direction, others = named.groups()
        failed = BLOCKS.index(block)
        assert direction == ("backward" if place == "backward" else "forward")
        assert others == ("0, 1" if world == 2 else "0-3")
        # One that died in the midst of a collective may have done its part.
        if way != "killed in the collective":
            assert block == ("stem" if place == "between" else "body")
        updated = 3 if direction == "backward" else failed
        assert states == ["new"] * updated + ["old"] * (3 - updated)
