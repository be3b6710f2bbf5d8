"""The names that the sources use and torch does not promise, in every torch that is supported.

``torch_names.json`` is written by one command, with an interpreter for each of them:

    python tests/suite/torch_names.py .venv/bin/python /path/to/torch-2.11/bin/python

Each imports its own torch and is asked for every name. What some lack stands there with the place
that does without it, which a person writes. Names are found by reading the sources: imports and
chains of attributes of which a part begins with an underscore, operators, tables of operators
(``TABLES``), attributes of torch's objects (``OWNERS`` says whose), methods of torch's classes that
are overridden. Neither arguments nor what a name does are looked at.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "src" / "shardwright"
LIST = Path(__file__).with_suffix(".json")

TABLES = {  # assignments whose strings are operators, and of which namespace
    ("trace/lowering/kernels.py", "_EQUAL"): "aten",
    ("tracker/owners.py", "_GATHERS"): "c10d",
    ("tracker/owners.py", "_SCATTERS"): "c10d",
    ("tracker/owners.py", "_OTHERS"): "c10d",
}
OPERATOR = re.compile(r"(aten|c10d|prims?|quantized|_c10d_functional|_dtensor)::(\w+)")

_FSDP = "torch.distributed.fsdp._fully_shard"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_OPTIMIZER = "torch.optim.Optimizer"
_GROUP = "torch.distributed.ProcessGroup"
OWNERS = {  # attributes that are reached from an object, which this does not follow
    "_allgather_base": _GROUP,
    "_apply": "torch.nn.Module",
    "_backward_hooks": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_cdata": "torch.UntypedStorage",
    "_compiled_call_impl": "torch.nn.Module",
    "_device_types": _GROUP,
    "_flatten": _MESH,
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_fsdp_param_group": f"{_FSDP}._fsdp_state.FSDPState",
    "_fsdp_param_groups": f"{_FSDP}._fsdp_state.FSDPState",
    "_get_backend": _GROUP,
    "_get_fsdp_state": "torch.distributed.fsdp.FSDPModule",
    "_get_root_mesh": _MESH,
    "_indices": "torch.Tensor",
    "_is_param": "torch.nn.parameter.Parameter",
    "_load_from_state_dict": "torch.nn.Module",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_modules": "torch.nn.Module",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_optimizer_step_post_hooks": _OPTIMIZER,
    "_optimizer_step_pre_hooks": _OPTIMIZER,
    "_orig_mod": "torch._dynamo.eval_frame.OptimizedModule",
    "_parameters": "torch.nn.Module",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_propagate_tensor_meta_non_cached": (
        "torch.distributed.tensor._sharding_prop.ShardingPropagator"
    ),
    "_reduce_scatter_base": _GROUP,
    "_schema": "torch._ops.OpOverload",
    "_sequence_nr": "torch.autograd.graph.Node",
    "_set_default_timeout": "torch.distributed.ProcessGroupGloo",
    "_should_skip_dynamo": "torch.utils._python_dispatch.TorchDispatchMode",
    "_spec": "torch.distributed.tensor.DTensor",
    "_timeout": "torch._C._distributed_c10d.Backend.Options",
    "_unsharded_inner_tensors": f"{_FSDP}._fsdp_param.FSDPParam",
    "_unsharded_param": f"{_FSDP}._fsdp_param.FSDPParam",
    "_values": "torch.Tensor",
    "_version": "torch.Tensor",
    "all_gather_single": _GROUP,
    "all_to_all_single": _GROUP,
    "alltoall_base": _GROUP,
    "reduce_scatter_single": _GROUP,
}
OTHERS = {  # of Python's, argparse's and TorchRec's objects
    *("_actions", "_exit", "_fields", "_replace", "_embedding_bag_collection", "_percentage"),
    *("_optimizer_classes", "_dense_tensor_estimate", "_hbm_reserved_bytes"),
    "_parameter_multiplier",
}
# What is read at all, and what a file gives to something of its own.
IMPORTS = re.compile(r"^\s*(?:import|from) torch\b", re.M)
HINTS = re.compile(
    r"(?<!self)(?<!cls)\._[a-z]|(?:import |^    )_[a-z]\w*,?$"
    r"|\baten\b|c10d|torch\.ops|[a-z]+::|attr\("
    rf"|\b(?:{'|'.join(OWNERS)})\b",
    re.M,
)
OWN = re.compile(r"(?:def |class |^\s*(?:\w+ = )?|self\.|, )(_\w+)(?=\(|: | =|, self|\)?:)", re.M)


def names_used() -> set[str]:
    """``torch._C._x``, ``torch.ops.aten.mm.default``; an attribute of an object as ``class:name``,
    as ``?:name`` where it is nobody's."""
    texts = {file: file.read_text() for file in sorted(SOURCES.rglob("*.py"))}
    own = {name for text in texts.values() for name in OWN.findall(text)}
    found: set[str] = set()
    for file, text in texts.items():
        if IMPORTS.search(text) and HINTS.search(text):
            found |= set(_File(file.relative_to(SOURCES).as_posix(), ast.parse(text), own).names())
    return found


def present(name: str, load: bool = False) -> bool:
    """Whether the torch of this process has a name. Of a module that is not loaded the text is
    read, for some take seconds to import, unless it is to ``load``."""
    chain, _, attribute = name.partition(":")
    module, rest = _module(chain.split("."), load)
    if isinstance(module, Path):
        text = module.read_text()
        return all(_says(text, word) for word in filter(None, (*rest, attribute)))
    try:
        found = reduce(getattr, rest, module)
    except AttributeError:
        return False
    return not attribute or _has(found, attribute)


def torch_version() -> str:
    """``2.13.0`` of ``2.13.0+cpu``."""
    import torch

    return torch.__version__.partition("+")[0]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


class _File:
    def __init__(self, path: str, tree: ast.AST, own: set[str]) -> None:
        self.path, self.own = path, own
        self.nodes = list(ast.walk(tree))
        self.stands_for: dict[str, str] = {}  # a name in the file, for which of torch's
        self._imports = set(self._imported())
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if meant := self._meant(value):
                        self.stands_for[name] = meant

    def names(self) -> Iterator[str]:
        """What the file uses, some twice."""
        yield from filter(self._counts, self._imports)
        longer = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            match node:
                case ast.Attribute(attr=name):
                    if chain := self._meant(node):
                        if id(node) not in longer and self._counts(chain):
                            yield chain
                    else:
                        yield from self._of_object(name)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr" | "Wrapped"),
                    args=[owner, ast.Constant(value=str(name)), *_],
                ):
                    if chain := self._meant(owner):
                        chain = f"{chain}.{name}"
                        yield from (chain,) if self._counts(chain) else ()
                    else:
                        yield from self._of_object(name)
                case ast.Constant(value=str(text)):
                    yield from (f"torch.ops.{a}.{b}" for a, b in OPERATOR.findall(text))
                case ast.Assign(targets=[ast.Name(id=table)], value=value):
                    space = TABLES.get((self.path, table))
                    yield from (f"torch.ops.{space}.{word}" for word in _words(value) if space)
                case ast.FunctionDef(name=name) if name in OWNERS:  # overridden
                    yield from self._of_object(name)

    def _imported(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == "torch":
                        short = alias.asname or "torch"
                        self.stands_for[short] = alias.name if alias.asname else "torch"
                        yield alias.name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if (node.module or "").partition(".")[0] == "torch":
                        meant = f"{node.module}.{alias.name}"
                        self.stands_for[alias.asname or alias.name] = meant
                        yield meant

    def _meant(self, node: ast.expr) -> str | None:
        """The chain that begins at torch for which an expression stands."""
        if isinstance(node, ast.Name):
            return self.stands_for.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self._meant(node.value)):
            return base if node.attr.endswith("__") else f"{base}.{node.attr}"
        return None

    def _counts(self, chain: str) -> bool:
        return chain.startswith("torch.ops.") or any(map(_private, chain.split(".")))

    def _of_object(self, name: str) -> Iterator[str]:
        if owner := OWNERS.get(name):
            yield f"{owner}:{name}"
        elif _private(name) and name not in self.own | OTHERS:
            yield f"?:{name}"


def _words(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split()


def _module(parts: list[str], load: bool) -> tuple[Any, list[str]]:
    """The module in which a chain begins and the rest of it; the file of one that is not loaded."""
    import torch

    found: Any = torch
    for place in range(1, len(parts)):
        path, file = ".".join(parts[: place + 1]), None
        if path not in sys.modules and load:
            with suppress(ImportError):
                importlib.import_module(path)
        elif path not in sys.modules:
            file = _file(Path(torch.__file__).parent.joinpath(*parts[1 : place + 1]))
        if path not in sys.modules and not file:
            return found, parts[place:]
        found = file or sys.modules[path]
    return found, []


def _file(module: Path) -> Path | None:
    files = (module.with_suffix(".py"), module / "__init__.py")
    return next(filter(Path.exists, files), None)


def _has(kind: Any, name: str) -> bool:
    """Whether objects of a class have an attribute, which it may set only as they are made."""
    if hasattr(kind, name):
        return True
    made = re.compile(rf"^    {name} *[:=]|\.{name}(: .*)? = ", re.M)
    written = {sys.modules[k.__module__] for k in kind.__mro__ if k.__module__.startswith("torch.")}
    files = (getattr(module, "__file__", None) or "" for module in written)
    return any(made.search(Path(file).read_text()) for file in files if file.endswith(".py"))


def _says(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def _write(interpreters: list[str]) -> None:
    """Ask every interpreter's torch for every name; what a person wrote stays."""
    written = json.loads(LIST.read_text())["in some"] if LIST.exists() else {}
    found: dict[str, list[str]] = {}
    for interpreter in interpreters:
        command = [interpreter, __file__, "--look"]
        asked = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        version, names = json.loads(asked.stdout)
        found[version] = names
    in_some = {
        name: {"in": having, "without it": written.get(name, {}).get("without it", "?")}
        for name in sorted(set().union(*found.values()))
        if (having := [v for v in sorted(found) if name in found[v]]) != sorted(found)
    }
    in_all = sorted(set.intersection(*map(set, found.values())))
    text = {"torch": sorted(found), "in some": in_some, "in all": in_all}
    LIST.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--look"]:
        print(json.dumps([torch_version(), [n for n in sorted(names_used()) if present(n, True)]]))
    else:
        _write(sys.argv[1:])
