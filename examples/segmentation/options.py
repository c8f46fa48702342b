"""The arguments of the recipe, and their help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """\
your own images and masks, on the GPUs of one machine:

  torchrun --standalone --nproc-per-node gpu examples/train_segmentation.py \\
    --data DIR --out runs/first --epochs 50 --batch 8 --crop 512 --amp bf16

  DIR/train/images/NAME.jpg (or .png) and DIR/train/masks/NAME.png, the same in DIR/val;
  or DIR/images and DIR/masks, of which --val-fraction is set aside for evaluation.
  Subfolders are not searched. Images are taken upright, as viewers show them (EXIF).
  A mask is a PNG as large as its image, grey or with a palette. The values of its pixels
  are the classes, 0, 1, 2, ...; 255 is no class, and counts neither in loss nor in evaluation.

going on after Ctrl-C, a crash or a time limit: the same line and

    --resume auto

on two machines, this line on both, with the address of one of them:

  torchrun --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 \\
    --rdzv-id job1 examples/train_segmentation.py --data DIR ...

on the CPU, with handwritten digits, in a minute:

  torchrun --standalone --nproc-per-node 2 examples/train_segmentation.py

what it writes: OUT/checkpoint.pt after every epoch, OUT/best.pt (the net alone, of the epoch with
the best mean IoU), OUT/log.jsonl (what the lines on the screen say, and the IoU of each class, as
JSON). To label other images with the best net:

  python examples/predict_segmentation.py OUT/best.pt IMAGE_OR_FOLDER... --out labels
"""


def number(kind: type, least: float, open_end: bool = False):
    """An argument's type: a number that is at least, or above, a bound."""

    def parse(text: str):
        value = kind(text)
        if value < least or (open_end and value == least):
            bound = "more than" if open_end else "at least"
            raise argparse.ArgumentTypeError(f"expected {bound} {least}, got {text}")
        return value

    parse.__name__ = kind.__name__  # what argparse calls it where kind() refuses
    return parse


def sync_bn(text: str) -> str | int:
    found = re.fullmatch(r"on|off|group:([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected on, off or group:N, got {text}")
    if found[1] == "1":
        raise argparse.ArgumentTypeError("group:1 is each rank by itself: give off for that")
    return int(found[1]) if found[1] else text


def path(text: str) -> Path:
    return Path(text).expanduser()  # which shells do not do in --out=~/runs


def checkpoint(text: str) -> str:
    return text if text == "auto" else str(path(text))


def parse_arguments(arguments: Sequence[str] | None = None, *, multiple: int) -> argparse.Namespace:
    """Reads the command line, or what is given in its place.

    Args:
        multiple: of which the net needs the sides of an image to be.
    """
    parser = argparse.ArgumentParser(
        prog="train_segmentation.py",
        description="Trains a net that labels every pixel, on any number of GPUs and machines.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("data").add_argument
    add("--data", type=path, metavar="DIR", help="images and masks (default: handwritten digits)")
    add("--classes", type=number(int, 2), help="how many (default: found out from all masks)")
    add(
        "--val-fraction",
        type=number(float, 0, True),
        default=0.2,
        help="of the images, to evaluate on, where there is no DIR/val (default: %(default)s)",
    )
    add("--crop", type=number(int, 1), help="side of a crop (default: 256; digits: 40)")
    add("--no-flip", action="store_true", help="do not mirror: left and right have a meaning")
    add(
        "--pages",
        type=number(int, 1),
        default=384,
        help="of digits, to train on; to evaluate on there are a quarter as many "
        "(default: %(default)s)",
    )
    add(
        "--workers",
        type=number(int, 0),
        help="processes a rank that prepare batches (default: 2; digits: 0)",
    )

    add = parser.add_argument_group("training").add_argument
    add(
        "--sync-bn",
        type=sync_bn,
        default="on",
        metavar="{on,off,group:N}",
        help="batch statistics over all ranks, over each rank alone (plain nn.BatchNorm2d), or "
        "over groups of N consecutive ranks (default: on)",
    )
    add("--epochs", type=number(int, 1), default=15, help="(default: %(default)s)")
    add(
        "--batch",
        type=number(int, 1),
        default=8,
        help="images a rank in one forward (default: %(default)s)",
    )
    add(
        "--accumulate",
        type=number(int, 1),
        default=1,
        metavar="K",
        help="make a step of K batches; batch norm still sees them one by one (default: 1)",
    )
    add(
        "--lr",
        type=number(float, 0, True),
        default=0.01,
        help="learning rate, for a global batch of --base-batch (default: %(default)s)",
    )
    add("--base-batch", type=number(int, 1), default=16, help="(default: %(default)s)")
    add(
        "--lr-scale",
        choices=("linear", "sqrt", "none"),
        default="sqrt",
        help="how the rate grows with the global batch, which is ranks x --batch x K "
        "(default: sqrt, as AdamW is used)",
    )
    add(
        "--warmup",
        type=number(float, 0),
        default=1,
        metavar="EPOCHS",
        help="over which the rate rises (default: %(default)s)",
    )
    add(
        "--decay",
        choices=("cosine", "poly"),
        default="cosine",
        help="how the rate falls afterwards",
    )
    add("--weight-decay", type=number(float, 0), default=0.01, help="(default: %(default)s)")
    add("--amp", choices=("off", "fp16", "bf16"), default="off", help="mixed precision")
    add("--seed", type=number(int, 0), default=0, help="of all random numbers (default: 0)")
    add(
        "--deterministic",
        action="store_true",
        help="on GPUs too, a resumed run is bit for bit the undisturbed one, as far as torch has "
        "deterministic kernels (it warns where not); slower",
    )

    add = parser.add_argument_group("evaluation, checkpoints, log").add_argument
    add(
        "--eval",
        choices=("sharded", "rank0"),
        default="sharded",
        help="by all ranks, each a share, or by rank 0 alone (default: sharded)",
    )
    add(
        "--predictions",
        action="store_true",
        help="at the end label what is held out with the net of the best epoch, as "
        "OUT/predictions/NAME.png: values are the classes, and a palette makes them visible",
    )
    add(
        "--out",
        type=path,
        default=Path("runs/segmentation"),
        help="folder of a run, which none of another is in (default: %(default)s)",
    )
    add(
        "--resume",
        type=checkpoint,
        metavar="{auto,PATH}",
        help="go on from a checkpoint; auto: from OUT's, where there is one",
    )
    add(
        "--log-every",
        type=number(int, 0),
        default=50,
        metavar="STEPS",
        help="how often to report, 0 for never; a report costs about two steps. 'data' is waiting "
        "for the next batch; 'compute' one step of a rank by itself; 'waiting' what the ranks have "
        "less to do than the slowest; 'collective' the rest, messages above all "
        "(default: %(default)s)",
    )
    add(
        "--timeout",
        type=number(float, 0, True),
        default=600,
        metavar="SECONDS",
        help="after which a collective that a rank is missing from is given up "
        "(default: %(default)s)",
    )

    args = parser.parse_args(arguments)
    if args.workers is None:
        args.workers = 0 if args.data is None else 2
    if args.crop is None:
        wanted = 40 if args.data is None else 256
        args.crop = -(-wanted // multiple) * multiple
    if args.crop % multiple:
        parser.error(f"--crop: expected a multiple of {multiple}, got {args.crop}")
    if args.val_fraction >= 1:
        parser.error(f"--val-fraction: expected less than 1, got {args.val_fraction}")
    return args
