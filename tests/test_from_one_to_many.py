"""The page from one GPU to many: its short script runs, its layer in plain torch is ours."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scripts
import torch
from inputs import assert_close, numpy, random
from optional import optional
from test_docs import pytestmark  # noqa: F401
from toolkits import ROOT

from syncbn_cuda import FastSyncBatchNorm

CHANNELS = 5
SHAPES = [(3, CHANNELS, 4, 6), (1, CHANNELS, 7, 2), (0, CHANNELS, 4, 4)]


def block(part):
    """Returns the one block of Python that has some part."""
    page = (ROOT / "docs" / "from-one-gpu-to-many.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if part in code)
    return code


def test_the_short_script_runs_as_it_stands(tmp_path):
    optional("sklearn")
    script = tmp_path / "short.py"
    script.write_text(block("load_digits"))
    done = scripts.run(*scripts.torchrun(2), script, cwd=tmp_path)
    share = float(re.fullmatch(r"([\d.]+)% of the digits .*\n", done.stdout)[1])
    assert share > 95
    assert (tmp_path / "digits.pt").exists() and "Warning" not in done.stderr


def plain_layer():
    """Returns the code of the layer, and its class."""
    code = block("class PlainSync")
    names: dict = {}
    exec(code, names)
    return code, names["PlainSyncBatchNorm"]


def test_it_is_short():
    code, _ = plain_layer()
    assert len(code.splitlines()) <= 50


def steps_rank(rank, dtype):
    """What comes of two steps and an evaluation, with second derivatives, of both layers."""
    results = []
    for kind in (plain_layer()[1], FastSyncBatchNorm):
        torch.manual_seed(rank)
        layer = kind(CHANNELS, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
            layer.bias.copy_(torch.linspace(-1, 1, CHANNELS))
        mine = []
        for step in range(2):
            x = random(SHAPES[rank], dtype, mean=rank + step).requires_grad_()
            y = layer(x)
            leaves = [x, layer.weight, layer.bias]
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
            mine += [y, *first, *second, *layer.buffers()]
        mine.append(layer.eval()(x))
        results.append([numpy(each) for each in mine])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_does_what_ours_does(run, dtype):
    # The plain layer's sums of squares, plain float64, lose some 2^-52 mean^2 of a variance.
    ulps = 4096 if dtype == torch.float64 else 32
    for plain, ours in run(3, steps_rank, dtype):
        for a, b in zip(plain, ours, strict=True):
            assert_close(a, b, dtype, ulps=ulps, scale=np.abs(b).max(initial=1))
