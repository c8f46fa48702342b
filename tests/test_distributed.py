"""Several ranks are one BatchNorm over the global batch: values, gradients, buffers, messages."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from inputs import DTYPES, LAYOUTS, assert_close, numpy, random
from torch.utils._pytree import tree_leaves
from training import train_once

from syncbn_cuda import FastSyncBatchNorm, functional

CHANNELS = 5
#: Samples a rank holds: equal, unequal, and with empty ranks.
SPLITS = [(2, 2), (1, 1), (3, 1), (0, 4), (4, 0), (2, 2, 2, 2), (1, 4, 0, 3), (0, 0, 1, 1)]
#: Shapes a rank holds, where more than their first dimension counts.
UNLIKE = [[(0, 5), (4, 5)], [(4, 5, 6, 7), (3, 5, 0, 0)], [(0, 5, 3), (2, 5, 3), (3, 5, 0)]]


def shards(counts, dtype=torch.float32, tail=(6, 7)):
    """Draws an input and a gradient for each rank, of a number of samples or of a whole shape."""
    torch.manual_seed(1)
    shapes = [n if isinstance(n, tuple) else (n, CHANNELS, *tail) for n in counts]
    return [
        (random(shape, dtype, mean=0.5 * rank), random(shape, dtype))
        for rank, shape in enumerate(shapes)
    ]


def train_layer(layer, x, dy):
    """Trains for one step; returns all that comes of it."""
    y, dx = train_once(layer, x, dy)
    return {
        "y": numpy(y),
        "dx": numpy(dx),
        "grads": [numpy(p.grad) for p in layer.parameters()],
        "state": {k: v.cpu().numpy().copy() for k, v in layer.state_dict().items()},
    }


def train_rank(rank, pieces, layout="contiguous", **arguments):
    """Trains a new layer on this rank's piece, twice: the second run gives the same bits."""
    x, dy = (LAYOUTS[layout](piece) for piece in pieces[rank])
    first, second = (
        train_layer(FastSyncBatchNorm(x.shape[1], **arguments), x, dy) for _ in range(2)
    )
    for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True):
        assert a.tobytes() == b.tobytes(), "two runs differ in their bits"
    return first


def values(arrays):
    """Returns the values of arrays (N, C, *) as one of (values, C)."""
    channels = arrays[0].shape[1]
    return np.concatenate([np.moveaxis(a, 1, -1).reshape(-1, channels) for a in arrays])


def assert_is_global(ranks, pieces, dtype, ulps=8.0):
    """Asserts that ranks trained as one batch: their own gradients, and the buffers' same bits."""
    inputs, slopes = ([numpy(piece[i]) for piece in pieces] for i in range(2))
    x, dy, channels = values(inputs), values(slopes), inputs[0].shape[1]
    batch, grads = reference.forward(x), reference.backward(dy, x)
    for rank, piece in zip(ranks, inputs, strict=True):
        assert rank["y"].shape == rank["dx"].shape == piece.shape
    assert_close(values([rank["y"] for rank in ranks]), batch.output, dtype, ulps)
    # What rounds are terms as large as dy over the standard deviation.
    scale = float(np.abs(dy).max() / np.sqrt(batch.var.min() + 1e-5))
    assert_close(values([rank["dx"] for rank in ranks]), grads.input, dtype, ulps, scale)
    seen = 0
    for rank, slope in zip(ranks, slopes, strict=True):
        own = values([slope])
        output = batch.output[seen : seen + len(own)]
        seen += len(own)
        expected = ((own * output).sum(0), own.sum(0))
        for grad, of_own in zip(rank["grads"], expected[: len(rank["grads"])], strict=True):
            assert_close(grad, of_own, torch.float32, ulps, float(np.abs(own).sum()) / channels)
    mean, var = reference.running(np.zeros(channels), np.ones(channels), batch, 0.1)
    assert_close(ranks[0]["state"]["running_mean"], mean, torch.float32)
    assert_close(ranks[0]["state"]["running_var"], var, torch.float32)
    for other in ranks:
        assert other["state"]["num_batches_tracked"] == 1
        for key, value in ranks[0]["state"].items():
            assert value.tobytes() == other["state"][key].tobytes(), f"{key} differs in its bits"


def batches_rank(rank, batches, arguments):
    return [train_rank(rank, pieces, **arguments) for pieces in batches]


def train_batches(run, batches, **arguments):
    """Trains on several batches with one start of ranks; yields the steps of each batch's ranks."""
    return zip(*run(len(batches[0]), batches_rank, batches, arguments), strict=True)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("counts", [*SPLITS, *UNLIKE], ids=str)
def test_ranks_are_one_batch(run, counts, affine):
    batches = [shards(counts, dtype) for dtype in (torch.float32, torch.float16)]
    for pieces, ranks in zip(batches, train_batches(run, batches, affine=affine), strict=True):
        assert_is_global(ranks, pieces, pieces[0][0].dtype)


@pytest.mark.parametrize("layout", ["channels_last", "permuted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_are_one_batch_in_every_type(run, dtype, layout):
    pieces = shards((3, 1), dtype)
    assert_is_global(run(2, train_rank, pieces, layout), pieces, dtype)


def test_image_sizes_may_differ_between_ranks(run):
    pieces = shards([(2, 3, 30, 30), (5, 3, 50, 41)])
    assert_is_global(run(2, train_rank, pieces), pieces, torch.float32)


def train_empty(rank, shape, dtype, needs_input):
    x = torch.empty(shape, dtype=dtype, requires_grad=needs_input[rank])
    layer = FastSyncBatchNorm(CHANNELS)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == dtype and (x.grad is not None) == needs_input[rank]
    return (
        y.shape == x.shape and (x.grad is None or x.grad.shape == x.shape),
        [numpy(p.grad) for p in layer.parameters()],
        {k: v.cpu().numpy().copy() for k, v in layer.state_dict().items()},
    )


@pytest.mark.parametrize(
    ("dtype", "needs_input"), [(torch.float32, (True, True)), (torch.float16, (True, False))]
)
@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 4, 4), (3, 5, 0, 0)], ids=str)
def test_when_every_rank_is_empty(run, shape, dtype, needs_input):
    for shapes_fit, grads, state in run(2, train_empty, shape, dtype, needs_input):
        assert shapes_fit and not np.any(grads)
        assert not state["running_mean"].any() and (state["running_var"] == 1).all()
        assert state["num_batches_tracked"] == 0


class Subclass(torch.Tensor):
    """A tensor type of a user's own."""


def single_value(rank, counts, tail, kind):
    """What the layer says to a single value, and to one a rank; and how many batches it counted."""
    layer, said = FastSyncBatchNorm(CHANNELS), []
    for count in (counts[rank], 1):
        try:
            layer(torch.randn(count, CHANNELS, *tail).as_subclass(kind))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
        said.append(layer.num_batches_tracked.item())
    return said


@pytest.mark.parametrize("kind", [torch.Tensor, Subclass])
@pytest.mark.parametrize("tail", [(), (1, 1)], ids=str)
@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (1, 0, 0)], ids=str)
def test_one_value_a_channel_in_the_whole_group_raises_on_every_rank(run, counts, tail, kind):
    for message, *rest in run(len(counts), single_value, counts, tail, kind):
        assert "FastSyncBatchNorm(5): expected more than 1 value per channel" in message
        assert "in the whole process group" in message and rest == [0, "nothing", 1]


def unserved_rank(rank):
    """A group with no CPU backend, as NCCL's: the layer refuses before any collective."""

    class CudaOnly:
        _device_types = [torch.device("cuda")]

        def name(self):
            return "nccl"

        def allreduce(self, tensors, options):
            raise AssertionError("reached the collective")

    layer = FastSyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError) as raised:
        functional.batch_norm(
            *(torch.randn(2, CHANNELS), layer.running_mean, layer.running_var),
            *(None, None, True, 0.1, 1e-5, None, CudaOnly(), layer),
        )
    return str(raised.value), layer.num_batches_tracked.item()


def test_a_model_never_moved_to_the_gpu_is_told_so(run):
    (message, batches), *_ = run(1, unserved_rank)
    for word in ("FastSyncBatchNorm(5)", "cpu", "nccl", "cuda()"):
        assert word in message
    assert batches == 0
