"""Whether a file defines a function that a job names, found by reading it: nothing is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from shardwright.core.errors import InputError, expected, nearest

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_defined(name: str, where: str) -> None:
    """InputError unless ``package.module:function`` can be imported from the working directory or
    is installed, and its file has the function. What a file makes as it runs is not looked for."""
    path, _, function = name.partition(":")
    if path in sys.modules:  # it says itself what it has
        return
    spec = _spec_of(path)
    if spec is None:
        wanted, remedy = f"an importable module '{path}'", "Run from the folder that holds it."
        raise InputError(expected(where, wanted, "none of that name", remedy))
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever imports it says why
        return
    names = list(_names(tree))
    if function.partition(".")[0] in names or {"*", "__getattr__"}.intersection(names):
        return
    own = [node.name for node in tree.body if isinstance(node, SCOPES)]
    near = nearest(function, own)
    wanted, remedy = f"a function '{function}' in {path}", f"There is {near}." if near else ""
    raise InputError(expected(where, wanted, "nothing of that name", remedy))


def _spec_of(path: str) -> ModuleSpec | None:
    """Where a module is, as importing it from the working directory would find it."""
    invalidate_caches()
    places, spec = [str(Path.cwd()), *sys.path], None
    for part in path.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None and spec is None:  # an installed one may have a finder of its own
            with suppress(ImportError, ValueError):
                found = find_spec(part)
        if found is None:
            return None
        spec, places = found, list(found.submodule_search_locations or ())
    return spec


def _names(tree: ast.AST) -> Iterator[str]:
    """What a file's own scope has names for, however they come; ``*`` for all of another's."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, SCOPES):
            yield node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        yield from _names(node)
