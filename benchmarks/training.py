"""A net to train: its batch norms of one kind, and the gradients of a batch.

float32 runs on contiguous tensors, bfloat16 under autocast and channels-last, as such nets are
usually trained.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Task, memory_format
from benchmarks.synchronised import convert

Step = Callable[[], Tensor]


def channels_last(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16


def model_of(
    task: Task, kind: type[nn.Module] | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Makes the net of a task, with the same weights at each call."""
    torch.manual_seed(0)
    model = task.make()
    assert model is not None
    convert(model, kind)
    return model.to(device, memory_format=memory_format(len(task.size), channels_last(dtype)))


def gradients(
    task: Task,
    forward: Callable[[Tensor], Any],
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Step:
    """Draws a batch; returns what runs it forward and backward, and returns the loss."""
    images, classes = task.batch(device, channels_last(dtype), seed)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(forward(images), classes)
        loss.backward()
        return loss.detach()

    return step


def compiled(model: nn.Module, backend: str = "inductor") -> Callable[[Tensor], Any]:
    """A model under the compiler, which keeps nothing of it for other models of its class."""
    return torch.compile(with_code_of_its_own(model), backend=backend)


def with_code_of_its_own(model: nn.Module) -> nn.Module:
    """Gives a model a copy of its forward.

    The compiler keeps what it made, and what it gave up, with the code of a function: where it
    gives up one implementation (nn.SyncBatchNorm does what it cannot follow), it would run those
    that share the code uncompiled as well.
    """
    kind = type(model)
    forward = kind.forward
    code = forward.__code__.replace(co_name=f"forward_{id(model)}")
    copy = types.FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    model.__class__ = type(kind.__name__, (kind,), {"forward": copy})
    return model
