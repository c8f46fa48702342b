"""What torch.compile is told: where its graphs may begin, and where errors are raised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")


def compiled_with_its_caller(function: Callable[..., T]) -> Callable[..., T]:
    """Marks what ``torch.compile`` takes into the graph of its caller, and never begins a graph at.

    Where it leaves the caller to Python, for a graph break or an error, all that this calls runs
    eagerly too. Else it would begin inside, at functions that have been told that nobody compiles.
    """
    with suppress(AttributeError):  # not public; without it such a break can end in an error
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def raise_in_python(error: type[Exception], text: str) -> NoReturn:
    """Raises an error outside of compiled code.

    A compiler that comes to it would leave the layer uncompiled from then on. With
    ``fullgraph=True`` there is no outside: the compiler itself raises, and shows the text.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(text)
    raise error(text)
