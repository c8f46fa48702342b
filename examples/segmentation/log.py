"""What rank 0 alone tells: lines, a progress bar, and the same numbers as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from segmentation.launch import World


def counted(number: int, noun: str) -> str:
    """As "1 rank" and "2 ranks"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


class Log:
    """Silent on all ranks but 0.

    Args:
        path: of a file with a JSON object a line; a resumed run goes on in it.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.leads = path, world.leads

    def begin(self, epochs: int) -> None:
        """Makes the file go on after some epochs, without what comes after them, or at all."""
        if not self.leads or not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _epoch(line) <= epochs]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def bar(self, title: str, steps: int) -> tqdm:
        disable = None if self.leads else True  # None: shown on a terminal, not in a file
        return tqdm(total=steps, desc=title, unit="step", disable=disable, leave=False, delay=0.5)

    def warn(self, text: str) -> None:
        if self.leads:
            tqdm.write(f"warning: {text}", file=sys.stderr)

    def say(self, text: str, **numbers: Any) -> None:
        """Prints a line above the progress bar, and writes its numbers, if any, to the file."""
        if not self.leads:
            return
        tqdm.write(text)
        if numbers:
            with open(self.path, "a") as file:
                file.write(json.dumps(numbers) + "\n")


def _epoch(line: str) -> float:
    """Which epoch a line is about; none is as late as one that was cut off."""
    try:
        return json.loads(line)["epoch"]
    except ValueError:
        return float("inf")
