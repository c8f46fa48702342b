"""What a layer expects of its input. Every error names the layer, what it expects and what came.

All but :func:`check_global_count` run before any collective, from what every rank knows by itself.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from syncbn_cuda._collective import is_traced, serves_cpu
from syncbn_cuda._compiler import raise_in_python
from syncbn_cuda._names import caller

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def fail(owner: torch.nn.Module | None, message: str, error: type = ValueError) -> NoReturn:
    """Raises an error that names the layer, or the function where there is none."""
    raise_in_python(error, f"{caller(owner)}: {message}")


def check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    owner: torch.nn.Module | None,
) -> None:
    """Checks shapes, types and devices of one call, in training and in evaluation.

    Raises:
        ValueError: a shape or a device does not fit.
        TypeError: a type is not supported.
    """
    if input.layout is not torch.strided:
        fail(owner, f"expected a dense input, got one of layout {input.layout}", TypeError)
    shape = input.shape
    if len(shape) < 2:
        fail(owner, f"expected at least 2D input (got {len(shape)}D input of shape {list(shape)})")
    if input.dtype not in DTYPES:
        fail(
            owner,
            f"expected input of float32, float64, float16 or bfloat16, got {input.dtype}",
            TypeError,
        )
    if torch.jit.is_tracing():
        return  # its sizes are no numbers to compare
    channels: Any = shape[1] if owner is None else owner.num_features
    if shape[1] != channels:
        fail(owner, f"expected input with {channels} channels in dim 1, got {list(shape)}")
    if channels == 0:
        fail(owner, f"expected a non-zero number of channels in dim 1, got {list(shape)}")
    for vector, label in (
        (weight, "weight"),
        (bias, "bias"),
        (running_mean, "running_mean"),
        (running_var, "running_var"),
    ):
        if vector is None:
            continue
        if vector.shape != (channels,):
            fail(owner, f"expected {label} of shape [{channels}], got {list(vector.shape)}")
        if vector.dtype != torch.float32 and vector.dtype != input.dtype:
            or_input = "" if input.dtype == torch.float32 else f" or of the input's {input.dtype}"
            fail(
                owner,
                f"expected {label} of float32{or_input}, got {vector.dtype} beside an input "
                f"of {input.dtype}",
                TypeError,
            )
        if vector.device != input.device:
            fail(
                owner,
                f"expected {label} on the input's device {input.device}, got {vector.device}: "
                f"move the model with .to({str(input.device)!r}), or the input",
            )


def lacks_float64(input: Tensor) -> bool:
    """Whether the message, which is float64, cannot exist on the input's device."""
    return input.is_mps


def check_training(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    buffers: tuple[Tensor | None, Tensor | None, Tensor | None],
    momentum: float | None,
    eps: float,
    group: Any | None,
    owner: torch.nn.Module | None,
    compiling: bool,
) -> None:
    """Checks what only training needs; ``buffers`` are running mean and variance and the counter.

    Raises:
        ValueError: this process acts alone on a single value a channel; eps is not positive; there
            is one of mean and variance; ``momentum=None`` comes without a counter; or the group has
            no backend for the input's device.
        RuntimeError: a tensor of inference mode is to be saved for backward or written outside.
    """
    if not eps > 0:
        fail(owner, f"expected eps to be positive when training, got {eps}")
    if (
        compiling
        and torch.compiler._is_exporting_flag  # torch 2.11 compiles is_exporting() as True
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (input, weight, bias))
    ):
        fail(
            owner,
            "an exported program keeps no backward: export in evaluation, model.eval(), or without "
            "gradients, under torch.no_grad(); to train what is exported, export a copy with plain "
            "batch norms, revert_sync_batchnorm(copy.deepcopy(model))",
            RuntimeError,
        )
    running_mean, running_var, counter = buffers
    if (running_mean is None) is not (running_var is None):
        fail(owner, "expected running_mean and running_var both or neither, got one of them")
    if running_mean is not None and running_var is not None:
        if momentum is None and counter is None:
            fail(owner, "momentum=None (a plain average) expected num_batches_tracked, got None")
        # This and the next are what autograd would raise after the collective, with the buffers
        # moved. One buffer speaks for all, as they are made together.
        if not compiling and running_mean.is_inference() and not torch.is_inference_mode_enabled():
            fail(
                owner,
                "buffers made in inference mode cannot be updated outside of it: make the layer "
                "outside, or copy it there",
                RuntimeError,
            )
    if (
        not compiling
        and (input.is_inference() or (weight is not None and weight.is_inference()))
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (input, weight, bias))
    ):
        fail(
            owner,
            "inference tensors cannot be saved for backward: clone input and weight outside of "
            "inference mode first",
            RuntimeError,
        )
    if group is None:
        if input.numel() == input.shape[1]:
            _fail_single_value(input, owner)
    elif input.is_cpu:
        if not compiling and not serves_cpu(group):
            fail(
                owner,
                f"expected input on a device that the process group serves, got {input.device} "
                f"with backend {group.name()!r}: move the model and its input to that backend's "
                "device (model.cuda()), or make the group with backend 'cpu:gloo,cuda:nccl'",
            )
    elif lacks_float64(input):
        fail(owner, f"expected input on a device with float64 to synchronise, got {input.device}")


def check_call(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    buffers: tuple[Tensor | None, Tensor | None, Tensor | None],
    owner: torch.nn.Module | None,
) -> None:
    """Checks the tensors of a call in training, as the operators do; what it raises stands alone.

    Raises:
        ValueError: as :func:`check`; or a buffer is not contiguous, or the counter not a single
            int64 beside the input.
        TypeError: a type is not supported.
    """
    try:
        check(input, buffers[0], buffers[1], weight, bias, owner)
        _check_written(input, buffers, owner)
    except (ValueError, TypeError) as error:
        raise error from None


def _check_written(
    input: Tensor,
    buffers: tuple[Tensor | None, Tensor | None, Tensor | None],
    owner: torch.nn.Module | None,
) -> None:
    for running, label in zip(buffers[:2], ("running_mean", "running_var"), strict=True):
        if running is not None and not running.is_contiguous():
            fail(owner, f"expected {label} to be contiguous, got strides {running.stride()}")
    counter = buffers[2]
    if counter is not None and (
        (counter.dtype, counter.numel(), counter.device) != (torch.int64, 1, input.device)
    ):
        fail(
            owner,
            f"expected num_batches_tracked to be one int64 on {input.device}, got "
            f"{list(counter.shape)} of {counter.dtype} on {counter.device}",
        )


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor only stands for one: of a trace, or of a CUDA graph that is captured."""
    if isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.device.type == "meta":
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_global_count(input: Tensor, stats: Tensor, owner: torch.nn.Module | None) -> None:
    """Checks the reduced count, on a rank that has at most one value a channel.

    Where the count is 1 every rank is such a rank, so all of them raise, before buffers change.
    Only here does the host read the message; compiled or captured it does not.

    Raises:
        ValueError: the whole group has a single value a channel.
    """
    if torch.compiler.is_compiling() or is_traced():
        return
    if has_no_values(stats):
        return
    if stats[-1].item() == 1:
        _fail_single_value(input, owner, " in the whole process group")


def _fail_single_value(input: Tensor, owner: torch.nn.Module | None, where: str = "") -> NoReturn:
    fail(
        owner,
        f"expected more than 1 value per channel when training{where}, got input size "
        f"{list(input.shape)}",
    )
