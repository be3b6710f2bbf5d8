"""Files of the runtime import in one direction, late imports and those for types included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "shardwright"
RUNTIME = SOURCES / "runtime"
# Imports by name are seen by no linter, so each says here what it is for.
BY_NAME = {
    "__init__.py": "public names, each loaded from its floor on first use",
    "cli/main.py": "the command that was asked for",
    "estimate/own_model.py": "the user's function",
    "planner/profiles.py": "TorchRec's world, by its one door",
    "runtime/optimizer.py": "the class of a row of optimizers",
    "torchrec/__init__.py": "public names of the adapter",
    "train/writers.py": "what a user may have installed",
    "trace/module.py": "a module of torch, so that it is there before a step",
}


def _imported(file: Path) -> set[str]:
    """Modules that a file imports anywhere in it, and names that may be modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_no_file_of_the_runtime_is_imported_by_one_that_it_imports() -> None:
    names = {
        ".".join(("shardwright.runtime", *file.relative_to(RUNTIME).with_suffix("").parts)): file
        for file in RUNTIME.rglob("*.py")
        if file.name != "__init__.py"
    }
    graph = {name: _imported(file) & names.keys() - {name} for name, file in names.items()}
    assert sum(map(len, graph.values())) > len(names)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_nothing_is_imported_by_name_but_where_it_says_why() -> None:
    found = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if any(word in file.read_text() for word in ("import_module", "__import__"))
    }
    assert found == BY_NAME.keys()
