"""What rank 0 alone tells: lines, a progress bar, and the same numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from segmentation.launch import World


class Log:
    """Silent on all ranks but 0.

    Args:
        path: of a file with a JSON object a line; a resumed run goes on in it.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.leads = path, world.leads

    def bar(self, title: str, steps: int) -> tqdm:
        return tqdm(
            total=steps, desc=title, unit="step", disable=not self.leads, leave=False, delay=0.5
        )

    def say(self, text: str, **numbers: Any) -> None:
        """Prints a line above the progress bar, and writes its numbers, if any, to the file."""
        if not self.leads:
            return
        tqdm.write(text)
        if numbers:
            with open(self.path, "a") as file:
                file.write(json.dumps(numbers) + "\n")
