"""Measures syncbn_cuda side by side with what else there is, one question at a time.

    python -m benchmarks                           # layers and host, on the GPU if there is one
    python -m benchmarks layers --device cpu --quick
    torchrun --standalone --nproc-per-node 2 -m benchmarks     # ranks
    python -m benchmarks --compare A.json B.json   # two runs, row by row
    python -m benchmarks --render A.json --out DIR # tables and plots of a run made elsewhere

Questions: layers (a layer's forward and backward), host (what a layer costs the host), ranks
(several processes), steps (a training step), message (what the ranks send each other), scaling (how
that grows, here and on paper), accuracy (how exact; fails where a cell is beyond its bound).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

import syncbn_cuda
from benchmarks import report
from benchmarks.compare import compare
from benchmarks.groups import rank
from benchmarks.machine import machine
from benchmarks.options import DTYPES, Options

#: The module of each question; imported when it is asked.
QUESTIONS = {
    "layers": "benchmarks.layers",
    "host": "benchmarks.host",
    "ranks": "benchmarks.ranks",
    "steps": "benchmarks.steps",
    "message": "benchmarks.message",
    "accuracy": "benchmarks.accuracy",
    "scaling": "benchmarks.scaling",
}

#: A median of fewer turns says little.
LEAST_TURNS = 30


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument("--quick", action="store_true", help="a subset of a minute or two")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="types of the inputs")
    parser.add_argument("--match", metavar="TEXT", default="", help="only what has it in its name")
    parser.add_argument("--turns", type=int, help="timed turns of each candidate")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no layer after them")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write bench-DEVICE.json, .md, plots"
    )
    parser.add_argument("--no-plots", action="store_true", help="write none")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSON", help="compare two runs; measures nothing"
    )
    parser.add_argument(
        "--render", type=Path, metavar="JSON", help="show a stored run; measures nothing"
    )
    parser.add_argument(
        "--allow-composite",
        action="store_true",
        help="measure even where the compiled kernels are not in use",
    )
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.questions if name not in QUESTIONS]:
        parser.error(f"no such question: {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.turns is not None and args.turns < 1:
        parser.error(f"--turns: expected at least 1, got {args.turns}")
    return args


def options_of(args: argparse.Namespace) -> Options:
    """Chooses what the arguments leave open; on CUDA makes the GPU of this rank current."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dtypes = args.dtypes or (["float32", "bfloat16"] if args.quick else list(DTYPES))
    return Options(
        device=device,
        quick=args.quick,
        turns=args.turns or (LEAST_TURNS if args.quick else 50),
        dtypes=tuple(DTYPES[name] for name in dtypes),
        match=args.match,
        seconds=args.seconds,
    )


def require_kernels(device: str, allow_composite: bool) -> bool:
    """Says whether the compiled kernels are in use; ends the program where they must be."""
    state = syncbn_cuda.build_info()[device]
    if not state["loaded"] and not allow_composite:
        sys.exit(
            f"benchmarks: the compiled {device} kernels are not in use: {state['reason']}\n"
            "Without them this would time torch against torch. "
            "--allow-composite does so all the same."
        )
    return state["loaded"]


def modules_of(questions: Iterable[str]) -> list[ModuleType]:
    return [importlib.import_module(QUESTIONS[name]) for name in questions]


def measured(args: argparse.Namespace) -> dict:
    """Asks the questions; returns the run, as it is stored."""
    if args.threads:
        torch.set_num_threads(args.threads)
    options = options_of(args)
    compiled = require_kernels(options.device.type, args.allow_composite)
    questions = args.questions or (["ranks"] if "RANK" in os.environ else ["layers", "host"])
    rows = [row for module in modules_of(questions) for row in module.measure(options)]
    if not rows and rank() == 0:
        sys.exit(f"benchmarks: nothing to measure: no name has {args.match!r} in it (--match)")
    return report.run_of(rows, machine(options.device), compiled)


def main() -> None:
    args = parse_arguments()
    if args.compare:
        print(compare(*args.compare))
        return
    run = json.loads(args.render.read_text()) if args.render else measured(args)
    if rank() > 0:
        return
    modules = modules_of(dict.fromkeys(row["question"] for row in run["rows"]))
    text = report.markdown(run, modules)
    print(text)
    if args.out:
        for path in report.write(run, text, modules, args.out, plots=not args.no_plots):
            print(f"Written: {path}")
    if failed := report.failures(run, modules):
        sys.exit("benchmarks: beyond their bounds:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
