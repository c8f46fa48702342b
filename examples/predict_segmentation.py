"""Labels images with a net that train_segmentation.py has trained.

    python examples/predict_segmentation.py runs/first/best.pt IMAGE_OR_FOLDER... --out labels

writes labels/NAME.png for every image, as large as it is: the values of its pixels are the classes,
and a palette makes them visible.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from segmentation import evaluation, folder, masks
from segmentation.data import IGNORED, Whole
from segmentation.launch import Refusal
from segmentation.log import counted
from torch import Tensor
from train_segmentation import MULTIPLE, UNet  # or the net that you put in its place there


class Unlabelled:
    """Images without masks."""

    def __init__(self, images: list[Path], classes: int) -> None:
        self.images, self.classes, self.channels = images, classes, 3
        self.names = [path.stem for path in images]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        image = folder.read_image(self.images[index])
        return image, torch.full(image.shape[1:], IGNORED)


def predict(weights: Path, given: list[Path], out: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        best = torch.load(weights, map_location="cpu", weights_only=True)
        classes, channels = best["classes"], best["channels"]
    except Exception as error:  # of many kinds, as it may be any file
        raise Refusal(f"{weights}: no best.pt of train_segmentation.py ({error})") from None
    if channels != 3:
        raise Refusal(f"{weights}: trained on handwritten digits, not on a folder of images")
    net = UNet(classes, channels=channels)
    try:
        net.load_state_dict(best["model"])
    except RuntimeError as error:
        raise Refusal(f"{weights}: of another net than {UNet.__name__} ({error})") from None
    label = partial(evaluation.evaluate, net.to(device), classes=classes, device=device)

    images = [
        image for path in given for image in (folder.find_images(path) if path.is_dir() else [path])
    ]
    samples = Unlabelled(images, classes)
    if len(set(samples.names)) < len(images):
        raise Refusal("two of the images have the same name: label them one after the other")
    out.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(samples.names):
        _, [labels] = label(Whole(samples, MULTIPLE), [index])
        masks.write_mask(out / f"{name}.png", labels.numpy())
    print(f"{counted(len(images), 'image')} labelled, in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Labels images with a trained net.")
    parser.add_argument("weights", type=Path, metavar="BEST.pt", help="what the training wrote")
    parser.add_argument("images", type=Path, nargs="+", help=".png or .jpg, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the labels")
    args = parser.parse_args()
    try:
        predict(args.weights, args.images, args.out)
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")


if __name__ == "__main__":
    main()
