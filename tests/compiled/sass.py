"""Reads what ptxas and nvdisasm say of kernels, and names what is wrong with one.

What counts is the loop over the elements. It is told from all others by the source lines that its
instructions come from: the outermost loop that loads and holds something of pack.cuh. Loops that
read shared memory come before or after it, once a channel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

PACKS = 'pack.cuh"'
SIZES = {"float": 4, "double": 8, "Half": 2, "BFloat16": 2}
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}

# As Itanium C++ mangles `syncbn::name<scalar, channels_last, vec>`.
SYMBOL = re.compile(r"_ZN6syncbn\d+(\w+?)I(f|d|N3c10\d+(\w+?)E)Lb([01])ELi(\d+)EE")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
LABEL = re.compile(r"\.L_x_\d+")
PACKS_IN_FLIGHT = 4  # what kUnroll comes to in each kernel
FLOAT64 = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|.*\.F64\b|MUFU\.\w+64H")


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel, as compiled for one architecture."""

    name: str
    scalar: str
    channels_last: bool
    vec: int
    registers: int
    shared: int  # static, in bytes
    stack: int  # bytes
    spilled: int  # bytes
    local: list[str]  # loads and stores of local memory, anywhere
    # In loops over the elements:
    accesses: dict[str, list[int]]  # bytes of each "load", "store" and "stream" (a store)
    packs: int  # loads of a pack before the first is waited for, the most in one loop
    issued: float  # instructions for each of them, without what single values take
    float64: list[str]
    slow: list[str]  # divisions and roots

    @property
    def size(self) -> int:
        return SIZES[self.scalar]

    @property
    def pack(self) -> int:
        return self.vec * self.size

    @property
    def layout(self) -> str:
        return "channels-last" if self.channels_last else "contiguous"

    def __str__(self) -> str:
        return f"{self.name}<{self.scalar}, {self.layout}, {self.vec}>"


def read(ptxas: str, sass: str) -> list[Kernel]:
    """The kernels of one cubin, from `ptxas -v` and from `nvdisasm -c -gi`."""
    resources = _resources(ptxas)
    _, *parts = re.split(r"^//-+ \.text\.(\S+) -+$", sass, flags=re.MULTILINE)
    return [
        _kernel(symbol, resources[symbol], _Code(code))
        for symbol, code in zip(parts[::2], parts[1::2], strict=True)
    ]


def _kernel(symbol: str, resources: dict[str, int], code: _Code) -> Kernel:
    instance = _instance(symbol)
    pack = instance["vec"] * SIZES[instance["scalar"]]
    loops = code.element_loops()
    looped = [opcode for loop in loops for opcode in code.opcodes(loop)]
    packs = {loop: _accesses(code.opcodes(loop)).get("load", []).count(pack) for loop in loops}
    main = max(loops, key=lambda loop: packs[loop], default=range(0))
    return Kernel(
        **instance,
        **resources,
        local=[i.opcode for i in code.instructions if i.opcode.startswith(("LDL", "STL"))],
        accesses=_accesses(looped),
        packs=packs.get(main, 0),
        issued=len(code.opcodes(main, pack)) / max(packs.get(main, 0), 1),
        float64=[opcode for opcode in looped if FLOAT64.match(opcode)],
        slow=[opcode for opcode in looped if opcode.startswith("MUFU")],
    )


def _instance(symbol: str) -> dict[str, Any]:
    found = SYMBOL.match(symbol)
    if found is None:
        raise ValueError(f"not an instance of a kernel: {symbol}")
    name, scalar, c10, channels_last, vec = found.groups()
    return {
        "name": name,
        "scalar": c10 or {"f": "float", "d": "double"}[scalar],
        "channels_last": channels_last == "1",
        "vec": int(vec),
    }


def _resources(ptxas: str) -> dict[str, dict[str, int]]:
    patterns = {
        "registers": r"Used (\d+) registers",
        "shared": r"(\d+) bytes smem",
        "stack": r"(\d+) bytes stack frame",
        "spilled": r"(\d+) bytes spill (?:stores|loads)",
    }
    entries = (entry.partition("'") for entry in ptxas.split("Compiling entry function '")[1:])
    return {
        symbol: {key: sum(map(int, re.findall(pattern, says))) for key, pattern in patterns.items()}
        for symbol, _, says in entries
    }


class _Instruction(NamedTuple):
    opcode: str
    target: str | None  # of a branch
    of_packs: bool  # known of most: inlining and unrolling lose some lines


class _Code:
    """The instructions of a kernel, and the places its branches go to."""

    def __init__(self, text: str) -> None:
        self.instructions: list[_Instruction] = []
        self.labels: dict[str, int] = {}
        of_packs = same_place = False
        for line in map(str.strip, text.splitlines()):
            if line.startswith("//## File"):  # one such line for each level of inlining
                of_packs = PACKS in line or (same_place and of_packs)
                same_place = True
            elif found := INSTRUCTION.match(line):
                target = LABEL.search(found[2]) if found[1].startswith("BRA") else None
                self.instructions.append(_Instruction(found[1], target and target[0], of_packs))
                same_place = False
            elif found := LABEL.match(line):
                self.labels[found[0]] = len(self.instructions)

    def opcodes(self, loop: range, pack: int = 0) -> list[str]:
        """All of a loop, or without the stretches that access less than a pack at once."""
        branches = {i + 1 for i in loop if self.instructions[i].opcode == "BRA"}
        cuts = sorted({loop.start, loop.stop} | ({*self.labels.values(), *branches} & {*loop}))
        stretches = [
            [instruction.opcode for instruction in self.instructions[begin:end]]
            for begin, end in zip(cuts, cuts[1:], strict=False)
        ]
        narrow = [any(w < pack for ws in _accesses(s).values() for w in ws) for s in stretches]
        return [o for s, drop in zip(stretches, narrow, strict=True) if not drop for o in s]

    def element_loops(self) -> list[range]:
        ends: dict[int, int] = {}  # of each loop, by its begin: a `continue` goes back there, too
        for i, instruction in enumerate(self.instructions):
            begin = self.labels.get(instruction.target or "", i + 1)
            if begin <= i:
                ends[begin] = i + 1
        loops = [range(begin, end) for begin, end in ends.items() if self._visits(begin, end)]
        return [
            loop
            for loop in loops
            if not any(o != loop and loop.start in o and loop.stop <= o.stop for o in loops)
        ]

    def _visits(self, begin: int, end: int) -> bool:
        body = self.instructions[begin:end]
        kinds = {instruction.opcode.partition(".")[0] for instruction in body}
        of_packs = any(instruction.of_packs for instruction in body)
        return "LDG" in kinds and "LDS" not in kinds and of_packs


def _accesses(opcodes: Iterable[str]) -> dict[str, list[int]]:
    accesses: dict[str, list[int]] = {}
    for opcode in opcodes:
        kind, *modifiers = opcode.split(".")
        if kind in ("LDG", "STG"):
            verb = "load" if kind == "LDG" else "stream" if "EF" in modifiers else "store"
            width = next((WIDTHS[m] for m in modifiers if m in WIDTHS), 4)
            accesses.setdefault(verb, []).append(width)
    return accesses


def faults(kernel: Kernel) -> list[str]:
    return [*_memory_faults(kernel), *_arithmetic_faults(kernel), *_access_faults(kernel)]


def _memory_faults(kernel: Kernel) -> Iterator[str]:
    if kernel.stack:
        yield f"{kernel} has a stack frame of {kernel.stack} bytes"
    if kernel.spilled:
        yield f"{kernel} spills {kernel.spilled} bytes of registers"
    if kernel.local:
        yield f"{kernel} uses local memory: {_counted(kernel.local)}"


def _arithmetic_faults(kernel: Kernel) -> Iterator[str]:
    if kernel.scalar != "double" and kernel.float64:
        yield f"{kernel} computes in float64 for each element: {_counted(kernel.float64)}"
    if kernel.slow:
        yield f"{kernel} divides for each element: {_counted(kernel.slow)}"


def _access_faults(kernel: Kernel) -> Iterator[str]:
    writes = kernel.name.endswith("elemt_kernel")
    verbs = ["load", "store", "stream"] if writes else ["load"]
    for verb in verbs:
        widths = Counter(kernel.accesses.get(verb, []))
        packs = widths.pop(kernel.pack, 0)
        # A pack that is shared with a neighbouring channel goes value by value, never streaming.
        values = 0
        if not kernel.channels_last and verb != "stream":
            values = widths.pop(kernel.size, 0)
        if packs == 0 or values > packs * kernel.vec or widths:
            found = _counted(f"{8 * width} bits" for width in kernel.accesses.get(verb, []))
            yield f"{kernel} should {verb} packs of {8 * kernel.pack} bits, does {found}"
        elif verb == "load" and kernel.packs < PACKS_IN_FLIGHT:
            yield f"{kernel} loads {kernel.packs} packs at once, not {PACKS_IN_FLIGHT}"


def _counted(things) -> str:
    return ", ".join(f"{n} x {thing}" for thing, n in Counter(things).items()) or "none"
