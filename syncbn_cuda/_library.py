"""Loads the compiled libraries, tells torch's tracers of their operators, picks who computes.

``kernels_for(device)`` answers with the five steps of a synchronised batch norm for a device: the
compiled operators where they are loaded, else the torch operations of :mod:`syncbn_cuda._composite`
under the same names.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from syncbn_cuda import _composite, _transforms

_PACKAGE = Path(__file__).resolve().parent


def _read_config() -> dict[str, Any]:
    """Returns what the build of this very package noted, empty where there was none.

    With another checkout installed as editable, the import would find that one's.
    """
    try:
        note = importlib.import_module("syncbn_cuda._build_config")
    except ImportError:
        return {}
    return note.CONFIG if Path(note.__file__ or "").resolve().parent == _PACKAGE else {}


CONFIG = _read_config()

#: The namespace of the operators. The fakes are registered for a namespace by its name, so that a
#: test library that offers the same operators elsewhere can be put in its place.
NAMESPACE = "syncbn_cuda"

STEPS = (
    "batch_norm_stats",
    "batch_norm_elemt",
    "batch_norm_elemt_running",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)


class Kernels:
    """The five steps under the names of :data:`STEPS`, as operator overloads, which tracers know.

    ``eager`` has them as what an overload calls in turn, without a frame of Python in between.
    """

    def __init__(self, namespace: str) -> None:
        self.eager = SimpleNamespace()
        for step in STEPS:
            overload = getattr(getattr(torch.ops, namespace), step).default
            setattr(self, step, overload)
            setattr(self.eager, step, getattr(overload, "_op", overload))


def _load(name: str) -> str | None:
    """Loads one library; returns why it could not be, or None."""
    path = _PACKAGE / f"{name}.abi3.so"
    if not path.exists():
        reason = CONFIG.get(f"{name[1:]}_reason") or f"{path.name} is not in {_PACKAGE}"
        if not CONFIG and (_PACKAGE.parent / "setup.py").exists():
            reason += (
                ": this is the source folder, which holds no build. Leave it, or install it with "
                "`pip install --no-build-isolation -e .`"
            )
        return reason
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return (
            f"{path.name} does not load: {error.__cause__ or error} (built with torch "
            f"{CONFIG.get('torch')}, this is {torch.__version__}): reinstall it beside this torch"
        )
    return None


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _load("_cuda")


def _driver_too_old() -> str | None:
    """Compares the driver with the runtime linked into the CUDA library (they may differ by minor).

    Called at the first CUDA tensor, never at import: asking the driver may initialise it, which
    breaks children forked later.
    """
    built = CONFIG.get("nvcc_version")
    if built is None:
        return None
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    if version.value // 1000 >= int(built.split(".")[0]):
        return None
    return (
        f"the kernels are built with CUDA {built}, the driver serves CUDA "
        f"{version.value // 1000}.{version.value % 1000 // 10}: update the driver, or build with a "
        "toolkit that it serves"
    )


class _Availability:
    """What is loaded, and why not; whether the driver serves it is found out at the first need."""

    def __init__(self) -> None:
        self.cpu_missing = _load("_cpu")
        self.cuda_missing = self.cpu_missing or _load_cuda()
        self.compiled = None if self.cpu_missing else Kernels(NAMESPACE)
        self.driver_checked = False

    def cuda(self) -> str | None:
        # A compiler can follow neither into the driver nor into a warning: an eager call asks.
        if not torch.compiler.is_compiling() and not self.driver_checked:
            self.driver_checked = True
            self.cuda_missing = self.cuda_missing or _driver_too_old()
            if self.cuda_missing:
                _report(
                    f"syncbn_cuda's CUDA kernels are not in use: {self.cuda_missing}. Slower torch "
                    "operations compute the same; see syncbn_cuda.build_info()."
                )
        return self.cuda_missing


def _report(message: str) -> None:
    """Warns, or raises where SYNCBN_REQUIRE_EXTENSION=1 forbids to run without the kernels."""
    if os.environ.get("SYNCBN_REQUIRE_EXTENSION", "0") not in ("", "0"):
        raise ImportError(message)
    warnings.warn(message, stacklevel=3)


_CPU = torch.device("cpu")


def checking_kernels(input: Tensor) -> Any | None:
    """The compiled operators where they check what they are called with: eager, on real tensors.

    None elsewhere: there :mod:`syncbn_cuda._checks` has to do it.
    """
    compiled = _available.compiled
    if type(input) is not Tensor or compiled is None or torch.compiler.is_compiling():
        return None
    if _transforms.active():
        return None
    if input.is_cpu or (input.is_cuda and _available.cuda() is None):
        return compiled.eager
    return None


def kernels_for(device: torch.device) -> Any:
    """The steps for tensors on a device: compiled operators or :mod:`syncbn_cuda._composite`."""
    compiled = _available.compiled
    if compiled is None:
        return _composite
    if device != _CPU:  # asking for the type takes as long as all the rest
        kind = device.type
        if kind not in ("cpu", "meta") and not (kind == "cuda" and _available.cuda() is None):
            return _composite
    return compiled if torch.compiler.is_compiling() else compiled.eager


def build_info() -> dict[str, Any]:
    """Returns what was built, what is loaded, and the reason where something is not.

    Returns:
        A dict: ``version`` and ``torch`` of this run, ``build`` (what the build decided and why;
        empty where nothing was built), and for ``cpu`` and ``cuda`` a dict of ``loaded`` (bool)
        and ``reason`` (str, or None where it is loaded).

    Example::

        >>> info = syncbn_cuda.build_info()
        >>> info["cpu"]["loaded"]
        True
    """
    from syncbn_cuda import __version__

    def state(missing: str | None) -> dict[str, Any]:
        return {"loaded": missing is None, "reason": missing}

    return {
        "version": __version__,
        "torch": torch.__version__,
        "build": dict(CONFIG),
        "cpu": state(_available.cpu_missing),
        "cuda": state(_available.cuda_missing),
    }


def is_cuda_ext_available() -> bool:
    """Returns whether the compiled CUDA kernels are loaded (see :func:`build_info` for why not)."""
    return _available.cuda_missing is None


def register_fakes(namespace: str) -> None:
    """Registers the fake (meta) kernels of all steps: shapes, types and strides without data."""

    def fake(step: str) -> Any:
        register = torch.library.register_fake(f"{namespace}::{step}")

        def with_check(kernel: Any) -> Any:
            @functools.wraps(kernel)
            def checked(*arguments: Any) -> Any:
                # A single meta tensor among real ones brings a call here: its result would be
                # memory that nobody wrote.
                devices = {a.device for a in arguments if isinstance(a, Tensor)}
                if len(devices) > 1:
                    raise ValueError(f"{namespace}::{step}: expected one device, got {devices}")
                return kernel(*arguments)

            return register(checked)

        return with_check

    @fake("batch_norm_stats")
    def stats(input: Tensor, *_: Any) -> Tensor:
        return input.new_empty(4 * input.shape[1] + 1, dtype=torch.float64)

    @fake("batch_norm_elemt")
    def elemt(input: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(input)

    @fake("batch_norm_elemt_running")
    def elemt_running(input: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(input)

    @fake("batch_norm_backward_reduce")
    def backward_reduce(
        grad_out: Tensor,
        input: Tensor,
        stats: Tensor,
        eps: float,
        weight_like_input: bool,
        bias_like_input: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels = input.shape[1]

        def gradient(like_input: bool) -> Tensor:
            return input.new_empty(channels, dtype=input.dtype if like_input else torch.float32)

        sums = input.new_empty(2 * channels, dtype=torch.float64)
        return sums, gradient(weight_like_input), gradient(bias_like_input)

    @fake("batch_norm_backward_elemt")
    def backward_elemt(grad_out: Tensor, input: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(input)


_available = _Availability()
if _available.cpu_missing is None:
    register_fakes(NAMESPACE)
else:
    _report(
        f"syncbn_cuda runs on slower torch operations, without its kernels: "
        f"{_available.cpu_missing}"
    )
