"""The ranks of a run: how they begin, wait for rank 0, and end, also on Ctrl-C and on an error."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

#: Exit statuses: of Ctrl-C as in a shell (also of SIGTERM), of a mistake of the user, and of any
#: other error.
INTERRUPTED, REFUSED, FAILED = 128 + signal.SIGINT, 2, 1

#: What ends a run: Ctrl-C, the end of a time limit, and either of them once more (_again).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

#: Seconds that Ctrl-C leaves a rank that waits in a collective, where Python does not get to run.
GRACE = 3.0


class Refusal(Exception):
    """A mistake of the user: shown as it stands, without a traceback."""


class OtherRankEnded(Exception):
    """Another rank failed or was interrupted, and has said why."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: the time limit of a queue, or torchrun, as another rank is gone."""


#: What the errors of Gloo and NCCL say where the process at the other end is gone.
LOST = re.compile("Connection (closed|reset) by peer|remote process exited")


@dataclass
class World:
    """The ranks of the run, as seen by one of them."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store
    #: What to say on Ctrl-C, or where another rank is gone.
    advice: str = "No epoch was completed; the same arguments start where this run did."
    _turns: int = field(default=0, repr=False)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of all machines. (LOCAL_RANK is 0 once on every machine.)"""
        return self.rank == 0

    def on_rank_0(self, function: Callable[[], Any]) -> Any:
        """Runs a function on rank 0 alone, however long it takes; returns its result on all ranks.

        The others look into the store now and then. In a collective (a barrier, say) they would
        be killed once the timeout of the process group is over. The result travels as JSON.
        """
        self._turns += 1
        key = f"turn {self._turns}"
        if self.leads:
            self.store.set(key, json.dumps(function()))
        while not self.store.check([key]):
            if self.store.check(["end"]):
                raise OtherRankEnded
            time.sleep(0.05)
        return json.loads(self.store.get(key))


def run(function: Callable[[World], None], timeout: float) -> None:
    """Joins the ranks that torchrun started, or makes a world of one; ends them whatever happens.

    No context manager: Ctrl-C while one is left would be raised outside of what it guards.

    Args:
        function: what to do with them.
        timeout: seconds after which a collective that a rank is missing from is given up.
    """
    world: World | None = None
    try:
        try:
            _catch_interrupt(lambda: _say_interrupted(world))
            world = _join(timeout)
            function(world)
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # one that is pending comes here at last
            # torch would raise that a process which prepares batches was ended by the same signal.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except BaseException as error:
        _leave(world, error)
    gc.collect()  # DistributedDataParallel, in cycles, keeps Gloo's threads beyond Python's end
    dist.destroy_process_group()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back while processes are started, which are then deaf to Ctrl-C.

    In the midst of a fork the exception would be raised where Python can only ignore it. Processes
    that prepare batches end with the rank, and need not all say that they were interrupted.
    """
    held: list[int] = []
    before = [signal.signal(number, lambda number, _: held.append(number)) for number in SIGNALS]
    told = signal.set_wakeup_fd(-1)  # which they would write to on behalf of this process
    try:
        yield
    finally:
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    if held:
        raise Terminated if signal.SIGTERM in held else KeyboardInterrupt


def _join(timeout: float) -> World:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if 0 < gpus < local_ranks:
        raise Refusal(
            f"{local_ranks} processes on a machine with {gpus} GPUs: give torchrun "
            f"--nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # before the process group, or all ranks would meet on GPU 0
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
        # torchrun keeps its store over restarts, with all that earlier ranks have left in it.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    dist.init_process_group(
        # Gloo is there beside NCCL for what lives in the memory of the CPU: objects.
        backend="cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device if gpus else None,
    )
    return World(rank, size, device, dist.PrefixStore("recipe", store))


def _catch_interrupt(say: Callable[[], None]) -> None:
    """Makes signals raise KeyboardInterrupt, and end the process where Python does not run."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while os.read(reading, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        time.sleep(GRACE)
        say()
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again
    # Processes that prepare batches are ended by it, without a word.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _again(ignored: sys.UnraisableHookArgs) -> None:
    """Raises an interruption a little later, where a signal came while Python ran a finaliser.

    What is raised in there (the callback of a weak reference, __del__) Python can only ignore.
    """
    if not isinstance(ignored.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    handler = _terminate if ignored.exc_type is Terminated else signal.default_int_handler
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def _leave(world: World | None, error: BaseException) -> NoReturn:
    """Says why the run ends, on the rank that was first, and ends the process at once.

    Not by destroy_process_group, nor by the end of Python, which waits for threads: the other ranks
    may be in the midst of a collective that will never be complete, and either could hang.
    """
    # Where torch.save is interrupted, it raises an error of its own over that.
    signalled = next((each for each in _chain(error) if isinstance(each, KeyboardInterrupt)), None)
    interrupted = signalled is not None
    first = _first_to_end(world, "interrupted" if interrupted else "failed")
    if isinstance(signalled, Terminated) and first == "failed":
        interrupted = False  # torchrun ends this rank as another one has failed, and said why
    if interrupted or first == "interrupted":
        # Without the others a collective fails as well: that is no error of its own.
        status = INTERRUPTED
        _say_interrupted(world)
    else:
        status = REFUSED if isinstance(error, Refusal) else FAILED
        if first == "":
            _show(world, error)
    for worker in multiprocessing.active_children():  # of a DataLoader; they would outlive this
        worker.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised over."""
    while error is not None:
        yield error
        error = error.__context__


def _say_interrupted(world: World | None) -> None:
    if world is not None and world.leads:
        print(f"\nInterrupted. {world.advice}", file=sys.stderr, flush=True)


def _first_to_end(world: World | None, reason: str) -> str:
    """Tells why another rank has ended before this one; empty where none has."""
    if world is None:
        return ""
    own = f"{reason} {world.rank}"
    try:
        first = world.store.compare_set("end", "", own).decode()
    except dist.DistError:  # whoever kept the store is gone
        return "failed"
    return "" if first == own else first.split()[0]


def _show(world: World | None, error: BaseException) -> None:
    if isinstance(error, Refusal):
        # A DataLoader's worker hands on its traceback as the text of the error.
        print(f"error: {str(error).rpartition('Refusal: ')[2].strip()}", file=sys.stderr)
        return
    if world and isinstance(error, RuntimeError) and LOST.search(str(error)):
        print(f"error: another rank was killed, or its machine. {world.advice}", file=sys.stderr)
        return
    print(f"\nRank {world.rank if world else '?'} failed, which ends the run:", file=sys.stderr)
    traceback.print_exception(error)
