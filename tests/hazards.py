"""What code that trusts nobody leaves alone, found in its syntax tree.

Loading pickles runs what is in them, as eval and a shell run what is in a text. A name counts under
whatever name it was imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

PICKLES = "loads pickles"
CODE = "runs a text as code"
SHELL = "gives a text to a shell"
NETWORK = "reaches for the network"
PEERS = "loads pickles of the ranks of its own process group"

CALLS = {
    **dict.fromkeys(("eval", "exec", "builtins.eval", "builtins.exec"), CODE),
    **dict.fromkeys(
        ("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
         "shelve.open", "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads",
         "joblib.load", "pandas.read_pickle", "torch.package.PackageImporter", "yaml.load"),
        PICKLES,
    ),
    **dict.fromkeys(
        ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
         "asyncio.create_subprocess_shell"),
        SHELL,
    ),
    **dict.fromkeys(
        ("torch.hub.load", "torch.hub.load_state_dict_from_url", "torch.hub.download_url_to_file"),
        NETWORK,
    ),
    **dict.fromkeys(
        (f"torch.distributed.{name}" for name in (
            "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
            "recv_object_list")),
        PEERS,
    ),
}  # fmt: skip
#: Calls that are safe with one argument alone: its name and value.
SAFE_WITH = {"torch.load": ("weights_only", True)}
#: Calls that one argument makes unsafe.
UNSAFE_WITH = {"allow_pickle": PICKLES, "shell": SHELL}
MODULES = {
    **dict.fromkeys(
        ("urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "huggingface_hub"), NETWORK
    ),
    "telnetlib": NETWORK,
}


def hazards(source: str) -> list[tuple[int, str, str]]:
    """Returns the line of each hazard, what is called or imported there, and what that does."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            top = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            found += [
                (node.lineno, name, MODULES[name.split(".")[0]])
                for name in top
                if name.split(".")[0] in MODULES
            ]
        elif isinstance(node, ast.Call):
            name = _name_of(node.func, names)
            found += [(node.lineno, name, why) for why in _why(name, node.keywords)]
    return sorted(found)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local names, and what they are in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    (alias.asname, alias.name)
                    if alias.asname
                    else (
                        alias.name.split(".")[0],
                        alias.name.split(".")[0],
                    )
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _name_of(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of what is called, in full; empty where it has none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def _why(name: str, keywords: list[ast.keyword]) -> Iterator[str]:
    given = {each.arg: each.value for each in keywords}
    if name in CALLS:
        yield CALLS[name]
    if name in SAFE_WITH:
        argument, value = SAFE_WITH[name]
        if not _is(given.get(argument), value):
            yield PICKLES
    for argument, why in UNSAFE_WITH.items():
        if argument in given and not _is(given[argument], False):
            yield why


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
