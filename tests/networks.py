"""Networks of torchvision and timm with random weights, small, and prepared to be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from optional import optional
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

timm = optional("timm")
torchvision = optional("torchvision")
feature_extraction = optional("torchvision.models.feature_extraction")

RANDOM = {"weights": None, "weights_backbone": None}


class Network(NamedTuple):
    """How a network is made, the shape of a sample, and what is made of it once converted."""

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    trace: Callable[[nn.Module], nn.Module] = lambda net: net


def _torchvision(name: str, **arguments) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, **{"weights": None, **arguments})


def _timm(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, num_classes=10)


def _features(net: nn.Module) -> nn.Module:
    nodes = ["layer1", "layer2.0.bn1", "layer3.1.bn2", "fc"]
    return feature_extraction.create_feature_extractor(net, nodes)


def _compiled(net: nn.Module) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(net, backend="aot_eager", fullgraph=True)


_segmentation = _torchvision("deeplabv3_resnet50", **RANDOM, aux_loss=True, num_classes=3)
_resnet18 = _torchvision("resnet18", num_classes=10)

#: So small that planes shrink to 2 x 2 values, or 3 x 3.
NETWORKS = {
    "resnet50": Network(_torchvision("resnet50", num_classes=10), (3, 40, 40)),
    "mobilenet_v3_small": Network(_torchvision("mobilenet_v3_small"), (3, 40, 40)),
    "deeplabv3_resnet50": Network(_segmentation, (3, 24, 24)),
    "efficientnet_b0": Network(_torchvision("efficientnet_b0"), (3, 40, 40)),
    "r3d_18": Network(_torchvision("r3d_18"), (3, 4, 32, 32)),
    "timm efficientnet_b0": Network(_timm("efficientnet_b0"), (3, 40, 40)),
    "timm resnet26": Network(_timm("resnet26"), (3, 40, 40)),
    "features of resnet18": Network(_resnet18, (3, 40, 40), _features),
    "traced resnet18": Network(_resnet18, (3, 40, 40), torch.fx.symbolic_trace),
    "compiled resnet18": Network(_resnet18, (3, 40, 40), _compiled),
}


def detector() -> nn.Module:
    """Without weights to start from it trains its backbone, batch norms too; here on few boxes."""
    return torchvision.models.get_model(
        "fasterrcnn_resnet50_fpn",
        **RANDOM,
        num_classes=3,
        min_size=64,
        max_size=96,
        rpn_pre_nms_top_n_train=50,
        rpn_post_nms_top_n_train=20,
        box_batch_size_per_image=16,
    )


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """Makes a network of the same random weights in every process, and lets it download nothing.

    Some networks start layers with a weight of 0, through which no gradient would pass.
    """
    torch.manual_seed(3)
    with mock.patch("socket.getaddrinfo", side_effect=AssertionError("asks for a host")):
        net = build()
    for layer in net.modules():
        if isinstance(layer, _BatchNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return net


def converted(net: nn.Module) -> nn.Module:
    """Converts a network and asserts that nothing is left of its batch norms."""
    count = sum(isinstance(layer, _BatchNorm) for layer in net.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(net)
    layers = [layer for layer in net.modules() if isinstance(layer, _BatchNorm)]
    assert layers and len(layers) == count
    left = {type(layer).__name__ for layer in layers if not isinstance(layer, FastSyncBatchNorm)}
    assert not left, f"not converted: {left}"
    return net


def without_chance(net: nn.Module) -> nn.Module:
    """Turns off dropout and stochastic depth, which would draw otherwise on each rank."""
    for layer in net.modules():
        if isinstance(layer, _DropoutNd | torchvision.ops.StochasticDepth):
            layer.p = 0.0
    return net


def without_kinks(net: nn.Module) -> nn.Module:
    """Puts smooth functions in the place of those with a jump in their derivative.

    At such a place a value off by a rounding changes gradients by percents. In float32 a network
    has values that near, different ones in each implementation.
    """
    smooth = {nn.ReLU: nn.SiLU, nn.Hardswish: nn.SiLU, nn.Hardsigmoid: nn.Sigmoid}
    for layer in list(net.modules()):
        for name, child in layer.named_children():
            if type(child) in smooth:
                setattr(layer, name, smooth[type(child)]())
            elif isinstance(child, nn.MaxPool2d):
                setattr(layer, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
    return net
