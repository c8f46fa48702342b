"""The demo runs and shows what it says it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripts import example, needs, run, torchrun

DEMO = "examples/digits_segmentation.py"


@needs(DEMO)
def test_the_demo_shows_that_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    figure = tmp_path / "demo.png"
    done = run(*torchrun(2), DEMO, "--quick", "--out", figure)

    numbers = json.loads(figure.with_suffix(".json").read_text())
    assert numbers["settings"]["ranks"] == 2
    first = {arm: numbers["difference_from_c"][arm]["first step"] for arm in "ab"}
    # Rounding of float32 (6e-8) through 9 convolutions, relative to the largest value. (Not of
    # the parameters: AdamW divides by the size of a gradient, and one of size 0 is all rounding.)
    assert first["b"]["logits"] < 2e-5
    assert first["b"]["gradients"] < 2e-5
    assert first["b"]["buffers"] < 1e-6
    # Without synchronisation the difference is one of substance: the comparison can tell.
    assert first["a"]["logits"] > 1e-2
    assert first["a"]["gradients"] > 1e-3

    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 20_000
    assert str(figure) in done.stdout
    assert "(b) FastSyncBatchNorm, 2 images a rank" in done.stdout
    assert "ms a step" in done.stderr, "no progress bar"
    assert "Warning" not in done.stderr


@needs(DEMO)
def test_the_demo_names_a_folder_that_is_missing(tmp_path: Path) -> None:
    done = run(DEMO, "--out", tmp_path / "missing" / "demo.png", succeeds=False)
    assert re.search("there is no folder .*missing", done.stderr)


@needs(DEMO)
def test_ranks_together_draw_the_pages_of_one_process() -> None:
    digits = example("digits")
    pages = digits.Pages(train=True)
    images, classes = pages.draw(seed=3, step=5, pages=range(4))
    assert images.shape == (4, 1, digits.PAGE, digits.PAGE)
    assert 1 < classes.unique().numel() <= digits.CLASSES
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        some_images, some_classes = pages.draw(seed=3, step=5, pages=range(4)[mine])
        assert some_images.equal(images[mine])
        assert some_classes.equal(classes[mine])
    assert not pages.draw(seed=3, step=6, pages=range(4))[0].equal(images)


UNEQUAL = "examples/unequal_batches.py"


@needs(UNEQUAL)
def test_the_weighting_of_unequal_batches_is_exact() -> None:
    lines = run(*torchrun(2), UNEQUAL).stdout.splitlines()
    errors = {line.split()[0]: float(line.split()[-1]) for line in lines if "difference" in line}
    assert errors["weighted_loss"] < 1e-12  # float64
    assert errors["mean_loss"] > 1e-2  # the comparison can tell
