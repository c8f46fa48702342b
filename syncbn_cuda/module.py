"""The layer: a replacement for ``torch.nn.SyncBatchNorm``."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_cuda import _checks, functional
from syncbn_cuda._collective import HeldGroup, hold_group, resolve_group


@functools.cache  # once a process: DataParallel makes new replicas of every layer at each forward
def _warn_of_replicas() -> None:
    warnings.warn(
        "FastSyncBatchNorm under nn.DataParallel: its replicas are threads of one process, which "
        "no process group joins, so each device normalises by its own part of the batch; to "
        "normalise over all of it use DistributedDataParallel, with one process for each device",
        stacklevel=3,
    )


class FastSyncBatchNorm(_BatchNorm):
    r"""Batch normalisation over the batches of all ranks, for any number of dimensions.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta

    Mean and variance are those of a channel over the batches of all ranks of the process group
    together, as :class:`torch.nn.BatchNorm2d` in one process would see them. Arguments, state and
    the rules of training and evaluation are those of :class:`torch.nn.SyncBatchNorm`. It runs on
    CUDA and on the CPU, and alone where ``torch.distributed`` is not initialised.

    Args:
        num_features: C, the number of channels of an input of shape ``(N, C, *)``.
        eps: added to the variance.
        momentum: the weight of a batch in the running buffers; None for the plain average over all
            batches so far.
        affine: whether the layer has a weight and a bias.
        track_running_stats: whether it keeps running mean and variance and evaluates with them.
            Without them it evaluates with the statistics of the local batch.
        process_group: the ranks to normalise over, or a one-dimensional ``DeviceMesh`` of them;
            None for the world, looked up at each forward. May be set anew at any time.
        device: where parameters and buffers are made.
        dtype: their type.
        bias: whether an affine layer has a bias.
        skip_nonfinite_update: leaves the running buffers as they are where a batch, with NaN or Inf
            on any rank, has statistics that are not finite; all ranks decide alike, and no host
            waits for it. May be set anew at any time. By default they become NaN or Inf, as those
            of ``nn.BatchNorm`` do, and stay it.

    Shape:
        - Input: ``(N, C, *)``, contiguous or channels-last; N may differ between ranks and be 0.
        - Output: the same shape, type and memory format.

    Raises:
        ValueError: ``process_group`` is a ``DeviceMesh`` of several dimensions; in forward see
            :func:`syncbn_cuda.functional.sync_batch_norm`.
        TypeError: ``process_group`` is no process group; in forward likewise.

    Note:
        Training makes one ``all_reduce`` in forward and one in backward, on every rank whose
        output leads to a loss; evaluation makes none, so one rank may evaluate alone. The
        accumulation types and what is deterministic: see
        :func:`syncbn_cuda.functional.sync_batch_norm`.

        In an activation checkpoint, reentrant or not, the recompute takes the statistics of the
        first pass: it makes no ``all_reduce`` and leaves the buffers alone. Compile such a model
        as a whole, on every rank: the compiler's own recompute may ask the peers again, and that
        of a block that was compiled by itself cannot be told apart.

        Copies (``copy.deepcopy``, ``AveragedModel``) share the process group. Pickles
        (``torch.save(model)``) drop it, with a warning, and it can be set again.

        ``nn.DataParallel`` cannot synchronise: there each device normalises by its own part of the
        batch, and a warning names ``DistributedDataParallel``.

    Example::

        >>> layer = FastSyncBatchNorm(16)
        >>> layer(torch.randn(2, 16, 8, 8)).shape
        torch.Size([2, 16, 8, 8])

    Reference:
        Ioffe & Szegedy, Batch Normalization, 2015, https://arxiv.org/abs/1502.03167
    """

    _group: HeldGroup | None = None
    skip_nonfinite_update: bool = False  # of converted layers, which had no such argument

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        skip_nonfinite_update: bool = False,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:  # not every torch that this runs on takes the argument
            self.register_parameter("bias", None)
        self.process_group = process_group
        self.skip_nonfinite_update = skip_nonfinite_update

    @property
    def process_group(self) -> Any | None:
        """The group to normalise over; None for the world."""
        return None if self._group is None else self._group.group

    @process_group.setter
    def process_group(self, process_group: Any | None) -> None:
        self._group = hold_group(process_group)

    def reset_parameters(self) -> None:
        """Sets the buffers to those of an untrained layer, weight to 1 and bias to 0."""
        self.reset_running_stats()
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a batch; in training together with the other ranks of the group."""
        if isinstance(input, torch.fx.Proxy):  # traced as a leaf, as torch's own layer is
            return _trace(self, input)
        # Where nn.Module would find them too, after all other places. What a parametrization, a
        # replica or FSDP has put elsewhere is an attribute.
        try:
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:
            weight, bias = self.weight, self.bias
        try:
            buffers = self._buffers
            running_mean, running_var = buffers["running_mean"], buffers["running_var"]
            num_batches_tracked = buffers["num_batches_tracked"]
        except KeyError:
            running_mean, running_var = self.running_mean, self.running_var
            num_batches_tracked = self.num_batches_tracked
        training = self.training
        if training and not self.track_running_stats:
            running_mean = running_var = None
        return functional.batch_norm(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            self.momentum,
            self.eps,
            num_batches_tracked if training else None,
            resolve_group(self._group) if training else None,
            self,
            self.skip_nonfinite_update,
        )

    def extra_repr(self) -> str:
        """Describes the layer as torch's do; the switch that these lack only where it is on."""
        switch = ", skip_nonfinite_update=True" if self.skip_nonfinite_update else ""
        return super().extra_repr() + switch

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuses ``torch.jit.script``, which asks this of each module before it changes any."""
        _checks.fail(
            self,
            "torch.jit.script compiles no collective; script a copy with plain batch norms, "
            "torch.jit.script(revert_sync_batchnorm(copy.deepcopy(model)).eval())",
            RuntimeError,
        )

    def _replicate_for_data_parallel(self) -> FastSyncBatchNorm:
        """Makes a replica for ``nn.DataParallel``, which would else fall short in silence."""
        _warn_of_replicas()
        return super()._replicate_for_data_parallel()  # type: ignore[no-any-return]

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        """Converts a model as :func:`syncbn_cuda.convert_sync_batchnorm` does, by torch's name.

        Args:
            module: the model, or a single layer.
            process_group: the ranks to normalise over; None for the world. To select layers use
                the function.
        """
        from syncbn_cuda.convert import convert_sync_batchnorm

        return convert_sync_batchnorm(module, process_group)


def _trace(layer: FastSyncBatchNorm, input: torch.fx.Proxy) -> torch.fx.Proxy:
    """Returns what stands for the output of a layer under ``torch.fx``."""
    tracer: Any = input.tracer
    if getattr(tracer, "root", None) is layer:
        _checks.fail(
            layer,
            "a layer is a leaf and so has no graph of its own: trace a model that holds it, "
            "nn.Sequential(layer)",
            torch.fx.proxy.TraceError,
        )
    path = tracer.path_of_module(layer)
    if type(layer).forward is FastSyncBatchNorm.forward:
        return tracer.create_proxy("call_module", path, (input,), {})
    # Of a subclass, the rest of its forward is traced as well: a leaf would do it again.
    itself = tracer.create_proxy("get_attr", path, (), {})
    return tracer.create_proxy("call_function", _normalise, (itself, input), {})


def _normalise(layer: FastSyncBatchNorm, input: Tensor) -> Tensor:
    """The part of a subclass's forward that is a leaf of a symbolic trace."""
    return FastSyncBatchNorm.forward(layer, input)
