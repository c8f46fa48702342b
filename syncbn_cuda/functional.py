"""The synchronised batch norm as a function: checks, kernels, and the collective between them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_cuda import _checkpoint, _checks, _collective, _composite, _transforms
from syncbn_cuda._collective import AllReduce, Sender, all_reduce, hold_group, resolve_group
from syncbn_cuda._compiler import compiled_with_its_caller
from syncbn_cuda._library import checking_kernels, kernels_for
from syncbn_cuda._plain import evaluate, train_alone
from syncbn_cuda._tensors import allocate_again, dense

__all__ = ["sync_batch_norm"]


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    process_group: Any | None = None,
    skip_nonfinite_update: bool = False,
) -> Tensor:
    r"""Batch normalisation over the batches of all ranks of a process group.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta

    In training, mean and (biased) variance are those of a channel over the batches of all ranks
    together, and so are their derivatives in backward. In evaluation they are the running buffers,
    and no rank talks to another. The positional arguments are those of
    :func:`torch.nn.functional.batch_norm`.

    Args:
        input: ``(N, C, *)``, float32, float64, float16 or bfloat16; contiguous, channels-last, or
            anything else (made contiguous once). N may differ between ranks and may be 0.
        running_mean: ``(C,)``, moved in place in training:
            ``(1 - momentum) * running_mean + momentum * mean``. Or None.
        running_var: ``(C,)``, the same for the unbiased variance (over ``count - 1``). Or None.
        weight: :math:`\gamma`, ``(C,)``, float32 or the input's type. None stands for 1.
        bias: :math:`\beta`, ``(C,)``, float32 or the input's type. None stands for 0.
        training: normalise with the statistics of this batch, and move the buffers.
        momentum: the weight of this batch in the buffers; None for the plain average over all
            batches, which needs ``num_batches_tracked``.
        eps: added to the variance.
        num_batches_tracked: int64, one value, advanced in training where the group saw any value.
        process_group: the ranks to normalise over, or a one-dimensional ``DeviceMesh`` of them;
            None for the world, or for this process alone where ``torch.distributed`` is not
            initialised.
        skip_nonfinite_update: leaves the buffers and the counter as they are where the statistics
            of a channel are not finite in the buffers' type. Decided on the device, on all ranks
            alike, from the reduced sums.

    Returns:
        A tensor of the input's shape, type and memory format.

    Raises:
        ValueError: a shape does not fit, a device differs or is not served by the group's backend,
            or the whole group has a single value a channel. Raised before any collective, except
            for the last where only the collective can tell; then every rank raises.
        TypeError: a type is not supported, or ``process_group`` is no process group.
        RuntimeError: a tensor of inference mode would be saved for backward, or written; or a
            program exported in training would lose its backward. Or the collective failed: the
            backend's own type and text, after the layer's name in the model and the group's ranks.

    Note:
        The message has a high and a low part of each sum, so that a variance loses no more than
        about ``2**-73 * mean**2``: nothing that counts up to ``mean / std`` of 1e6 in float32 and
        of 1e4 in float64. NaN or Inf in a channel makes the output of that channel NaN, and its
        buffers NaN or Inf, as in BatchNorm; for the latter see ``skip_nonfinite_update``.

        Every rank of the group has to run each training forward, and its backward if any does; one
        without data takes part with an empty batch, ``input[:0]``, whose output leads to its loss.
        ``create_graph=True`` has to be given on all ranks or on none. Derivatives beyond the first,
        and those of ``torch.func`` and of forward-mode AD, come from torch operations in float64
        that keep up to five float64 tensors of the input's size; all ranks have to run the same
        transforms.

        ``torch.compile`` makes one graph of it, for any batch size. Compiled or captured in a CUDA
        graph, a single value a channel in a group of several ranks goes unnoticed.

        Sums are accumulated in float32 shifted by the data (float64 for float64 input) and leave a
        rank as float64. One ``all_reduce`` of ``4C + 1`` doubles in forward and one of ``2C`` in
        backward; nothing is read back by the host, unless a rank holds at most one value a channel.
        Two runs give the same bits, and the buffers are the same bits on every rank.
        The gradients of weight and bias are this rank's own, as ``DistributedDataParallel`` wants.

    Example::

        >>> x = torch.randn(4, 3, 8, 8)
        >>> mean, var = torch.zeros(3), torch.ones(3)
        >>> y = sync_batch_norm(x, mean, var, training=True)
        >>> torch.allclose(y.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5)
        True

    Reference:
        Ioffe & Szegedy, Batch Normalization, 2015, https://arxiv.org/abs/1502.03167
    """
    return batch_norm(
        input,
        running_mean,
        running_var,
        weight,
        bias,
        training,
        momentum,
        eps,
        num_batches_tracked,
        resolve_group(hold_group(process_group)) if training else None,
        None,
        skip_nonfinite_update,
    )


@compiled_with_its_caller
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    num_batches_tracked: Tensor | None,
    group: Any | None,
    owner: torch.nn.Module | None,
    skip_nonfinite: bool = False,
) -> Tensor:
    """As :func:`sync_batch_norm` with the group resolved (None: alone); errors name the owner.

    A layer, the owner, without running buffers evaluates with the statistics of its local batch.
    """
    watch = _collective.watch
    if watch is not None and not (torch.compiler.is_compiling() or watch.is_within()):
        return watch.call(  # type: ignore[no-any-return]
            *(batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps),
            *(num_batches_tracked, group, owner, skip_nonfinite),
        )
    if not training:
        _checks.check(input, running_mean, running_var, weight, bias, owner)
        return evaluate(input, running_mean, running_var, weight, bias, eps, owner)
    buffers = (running_mean, running_var, num_batches_tracked)
    kernels = checking_kernels(input)
    shape = input.shape
    fits = len(shape) > 1 and (owner is None or shape[1] == owner.num_features)
    if kernels is None or not fits:
        _checks.check_call(input, weight, bias, buffers, owner)
    compiling = kernels is None and torch.compiler.is_compiling()
    try:
        _checks.check_training(input, weight, bias, buffers, momentum, eps, group, owner, compiling)
        passage = None
        if not compiling and _checkpoint.may_be_around():
            if _checkpoint.selects():
                with _checkpoint.unselected():
                    return batch_norm(
                        *(input, running_mean, running_var, weight, bias, training, momentum, eps),
                        *(num_batches_tracked, group, owner, skip_nonfinite),
                    )
            passage = _checkpoint.Passage(input, owner)
        if kernels is None and _checks.lacks_float64(input):
            return train_alone(
                *(input, *buffers, weight, bias, momentum, eps, skip_nonfinite, passage)
            )
        if passage is not None and passage.is_recompute:
            buffers = (None, None, None)  # the first pass has moved them
        if kernels is None and _transforms.active():
            return _transforms.train(
                *(input, *buffers, weight, bias, momentum, eps, skip_nonfinite),
                *(group, owner, passage),
            )
        return _SyncBatchNorm.apply(
            input if input.is_contiguous() else dense(input),
            weight if weight is None else weight.contiguous(),
            bias if bias is None else bias.contiguous(),
            *buffers,
            (momentum, eps, skip_nonfinite, group, owner, kernels, compiling, passage),
        )
    except (RuntimeError, ValueError):
        _checks.check_call(input, weight, bias, buffers, owner)  # the operators name no layer
        allocate_again(input)
        raise


class _SyncBatchNorm(torch.autograd.Function):
    """Statistics, their sum over ranks, normalise; in backward sums, their sum over ranks, apply.

    Backward keeps the input, the weight and the reduced message, from which every kernel derives
    the statistics. The running buffers are not kept: others may write them between two forwards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        call: tuple[Any, ...],
    ) -> Tensor:
        # The rest in one tuple: autograd looks at each argument of its own, forward and backward.
        # (Tensors are not in it, or torch.jit.trace would not find them.)
        momentum, eps, skip_nonfinite, group, owner, checking, compiling, passage = call
        buffers = (running_mean, running_var, num_batches_tracked)
        kernels = checking or kernels_for(input.device)
        # Weak: a layer may hold its output, and an output may outlive its layer.
        layer = None if compiling or owner is None else weakref.ref(owner)
        if passage is not None and passage.is_recompute:
            stats = passage.stats
        else:
            # Also where they have been checked: compilers make one step of two that look alike.
            stats = kernels.batch_norm_stats(input, weight, bias, *buffers)
            if group is not None:
                stats = all_reduce(stats, group, compiling, layer, "forward", input)
                if input.numel() <= input.shape[1]:
                    _checks.check_global_count(input, stats, owner)
        if passage is not None:
            passage.keep(stats)
        ctx.save_for_backward(input, weight, stats)
        bias_like_input = bias is not None and bias.dtype is not torch.float32
        ctx.of_call = (eps, group, bias_like_input, checking, passage, layer)
        if running_mean is None or running_var is None:
            return kernels.batch_norm_elemt(input, stats, weight, bias, eps)
        output = kernels.batch_norm_elemt_running(
            input, stats, weight, bias, eps, *buffers, momentum, skip_nonfinite
        )
        if not compiling:
            # An operator's schema alone does not tell autograd that the buffers were written.
            written = (running_mean, running_var)
            counter = num_batches_tracked
            increment_version(written if counter is None else (*written, counter))
        return output

    @staticmethod
    @compiled_with_its_caller
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        try:
            return (*_gradients(ctx, grads[0]), None, None, None, None)
        except RuntimeError:
            allocate_again(grads[0])
            raise


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias."""
    input, weight, stats = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    eps, group, bias_like_input, kernels, passage, layer = ctx.of_call
    if passage is not None:
        passage.check()
    weight_like_input = weight is not None and weight.dtype is not torch.float32
    compiling = torch.compiler.is_compiling()  # compiled autograd does a backward of eager forwards
    # create_graph=True, or a transform around this backward alone: the same steps in operations
    # that both see through, from statistics that depend on the input (and so on every rank's).
    differentiable = not compiling and (torch.is_grad_enabled() or _transforms.active())
    if differentiable:
        kernels = _composite
        stats = kernels.batch_norm_stats(input)
        if group is not None:
            # Where the input needs no gradient too, so that this rank's second backward comes to
            # the collective that a peer's waits in.
            if not stats.requires_grad:
                stats.requires_grad = True  # requires_grad_() is refused inside of torch.func
            sender = Sender(group, layer, "backward with create_graph=True")
            (stats,) = AllReduce.apply(sender, stats)
    else:
        if compiling or kernels is None:
            kernels = kernels_for(input.device)
        if grad_out.stride() != input.stride():
            grad_out = torch.empty_like(input).copy_(grad_out)
    sums, grad_weight, grad_bias = kernels.batch_norm_backward_reduce(
        grad_out, input, stats, eps, weight_like_input, bias_like_input
    )
    # Whatever needs a gradient here: a peer may need more, and it waits for this rank.
    if group is not None:
        if differentiable:
            sums, grad_weight, grad_bias = AllReduce.apply(sender, sums, grad_weight, grad_bias)
        else:
            sums = all_reduce(sums, group, compiling, layer, "backward", input)
    grad_input = None
    if needs_input:
        grad_input = kernels.batch_norm_backward_elemt(grad_out, input, stats, sums, weight, eps)
    return grad_input, grad_weight if needs_weight else None, grad_bias if needs_bias else None
