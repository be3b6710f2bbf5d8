"""Why a module cannot be traced, in one line that names the part of it and says what to do."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.nn.parameter import is_lazy

import shardwright
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.tracker.private import own_buffers, own_parameters

LONGEST = 160  # letters of another's message that are repeated


class Untraceable(Exception):  # noqa: N818 - what a module is, named by its user
    """``cause`` was raised while the module at ``path`` ran, or its backward."""

    def __init__(self, path: str, cause: Exception) -> None:
        super().__init__(path, cause)
        self.path, self.cause = path, cause


def explained(error: Untraceable, module: nn.Module, where: str, called: str) -> UnsupportedError:
    """The error as a person reads it; ``called`` says with what the module was called."""
    wanted, found, remedy = _reason(error.cause, called)
    if isinstance(error.cause, DataDependentOutputException):
        kind = named(module, error.path).rpartition("(")[2].rstrip(")")
        remedy = _REMEDIES.get(kind, remedy)
    place = f"{where}: {named(module, error.path)}{place_of(error.cause) or ''}"
    return UnsupportedError(place, wanted, found, remedy)


def named(module: nn.Module, path: str) -> str:
    """A part of a module by path and class."""
    try:
        kind = type(module.get_submodule(path)).__name__
    except AttributeError:
        kind = "module"
    return f"module '{path}' ({kind})" if path else kind


def first_line(error: BaseException) -> str:
    """An error's class and the beginning of what it says."""
    lines = str(error).strip().splitlines()
    text = lines[0].strip().removesuffix(".") if lines else ""
    short = text if len(text) <= LONGEST else f"{text[:LONGEST].rstrip()}..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def check_module(module: nn.Module, where: str, tables: Collection[str] = ()) -> None:
    """Refuse what fake tensors cannot stand for, before anything runs. Embeddings that are
    ``tables``, by path, have no gradient."""
    for path, part in module.named_modules():
        place = f"{where}: {named(module, path)}"
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            remedy = "Return it as it is; compile units after sw.apply."
            raise UnsupportedError(place, "a module as it is", "a compiled one", remedy)
        is_sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        if is_sparse and path not in tables:
            raise UnsupportedError(
                place,
                "a dense gradient",
                "sparse=True, whose size depends on the ids of a batch",
                "Build it with sparse=False, or let it be routed: give train.table_optimizer.",
            )
        for name, tensor in _own(part):
            _check_tensor(tensor, f"{place}, tensor '{name}'")


def _own(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for held in (own_parameters(part), own_buffers(part)):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)


def _check_tensor(tensor: torch.Tensor, place: str) -> None:
    if is_lazy(tensor):
        raise UnsupportedError(
            place,
            "a shape",
            "a lazy one that its first batch would decide",
            "Give the module its sizes, or call it once in the function.",
        )
    if tensor.device.type not in ("cpu", "meta"):
        raise UnsupportedError(
            place,
            "a tensor on the CPU, where nothing is allocated for it",
            f"one on '{tensor.device}'",
            "Build the model without a device; memory.lowering names the one to estimate.",
        )
    if tensor.layout is not torch.strided or tensor.is_complex():
        found = "a complex one" if tensor.is_complex() else f"layout {tensor.layout}"
        remedy = "Keep its real and imaginary parts, as torch.view_as_real gives them."
        remedy = remedy if tensor.is_complex() else "Keep its values in a dense one."
        raise UnsupportedError(place, "a dense tensor of real numbers", found, remedy)


@contextmanager
def without_pointers() -> Iterator[None]:
    """Who asks a fake tensor for its pointer is refused inside: torch answers 0."""

    def refuse(tensor: FakeTensor) -> int:
        raise RuntimeError("data_ptr() of a fake tensor")

    # A kernel of the user's own (Triton, a C extension) that is given the address 0 would read
    # there: refused, it is an error with a line that names the module.
    FakeTensor.data_ptr = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del FakeTensor.data_ptr


@contextmanager
def without_log() -> Iterator[None]:
    """What a fake tensor refuses is raised inside, without the traceback that torch logs first."""
    log = logging.getLogger(FakeTensor.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def no_gradient(result: object, where: str) -> InputError:
    """The loss of a module does not depend on a trained parameter."""
    found = "one without a gradient"
    if not isinstance(result, torch.Tensor):
        found = f"{type(result).__name__} without a tensor that has one"
    wanted = "a floating-point result that depends on trained parameters"
    remedy = "Let requires_grad be true for what is trained, and use no torch.no_grad()."
    return InputError(where, wanted, found, remedy)


def _reason(error: Exception, called: str) -> tuple[str, str, str]:
    """What was wanted, what was found, and the remedy."""
    text = str(error)
    if isinstance(error, DynamicOutputShapeException):
        wanted = "shapes that do not depend on values"
        remedy = "Write it with fixed shapes: a capacity, torch.where, or a product with the mask."
        return (wanted, f"{error.func}, whose result is as large as its values say", remedy)
    if isinstance(error, DataDependentOutputException):
        return (
            "a forward that does not read values of tensors",
            f"{error.func}, as of .item(), .tolist() or an if on a tensor",
            "Put a number there for the estimate, or compute with the tensor.",
        )
    if _without_fake(error):
        found = error.func if isinstance(error, UnsupportedOperatorException) else first_line(error)
        return (
            "operators that have a fake implementation",
            str(found),
            "Register one with torch.library.register_fake, or use an operator of torch.",
        )
    if _touches_memory(text):
        return (
            "a forward of torch's operators alone",
            f"an access to a tensor's memory ({first_line(error)})",
            "Replace numpy and pointers by operators, or give the kernel a fake implementation.",
        )
    return (
        f"a module that runs on fake tensors with {called}",
        first_line(error),
        "Give what it takes: a job's function returns (module, inputs) or (module, inputs, loss).",
    )


# Modules of torch that look at a mask, unless the caller says what it is, and of TorchRec that look
# at lengths.
_COLLECTION = "Give train.table_optimizer: its tables are a plan's then, with an exchange of ids."
_REMEDIES = {
    "EmbeddingBagCollection": _COLLECTION,
    "EmbeddingCollection": _COLLECTION,
    "TransformerDecoder": "Call it with tgt_is_causal=True or False, so that torch need not look.",
    "TransformerEncoder": "Call it with is_causal=True or False (src_is_causal of nn.Transformer), "
    "so that torch need not look.",
}


def _without_fake(error: Exception) -> bool:
    text = str(error)
    if isinstance(error, UnsupportedOperatorException):
        return True
    missing = ("no fake impl", "register_fake", "Meta' backend", "meta kernel", "Meta tensors")
    return isinstance(error, (NotImplementedError, RuntimeError)) and any(
        part in text for part in missing
    )


def _touches_memory(text: str) -> bool:
    signs = ("data_ptr", ".numpy()", "Numpy is not", "__array__", "__dlpack__")
    return any(sign in text for sign in signs)


_TORCH, _OURS = (Path(package.__file__).parent for package in (torch, shardwright))
_LOOKUPS = (functional.embedding.__code__, functional.embedding_bag.__code__)


def place_of(error: BaseException) -> str | None:
    """The last line of the user's code on the way to an error, or nothing where torch alone was
    called; None where the error is ours."""
    paths = [(Path(f.filename), f) for f in traceback.extract_tb(error.__traceback__)]
    # operators, who follows them, and what refuses some
    trace = _OURS / "trace"
    own = (trace / name for name in ("recorder.py", "checks.py", "faked.py"))
    passed = {_TORCH, _OURS / "tracker", *own}
    path, frame = [(p, f) for p, f in paths if passed.isdisjoint((p, *p.parents))][-1]
    if not {_OURS / "estimate", _OURS / "train"}.isdisjoint(path.parents):
        return ""
    return None if _OURS in path.parents else f", {path.name}:{frame.lineno} ({frame.name})"


class WrongId(NamedTuple):
    """An id that is no row: the module that looked it up, where it is among the ids, and the rows
    that there are with what was found instead."""

    of: str
    place: int | list[int]
    found: tuple[int, int]


def wrong_id(error: BaseException) -> WrongId | None:
    """The first id of a lookup that ended in ``error``, for it is no row; None where it ended in
    another one. Torch names neither."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [place for place, frame in enumerate(frames) if frame.f_code in _LOOKUPS]
    if not places:
        return None
    given = frames[places[-1]].f_locals
    ids, rows = given["input"], len(given["weight"])
    wrong = ((ids < 0) | (ids >= rows)).nonzero()
    if not len(wrong):
        return None
    place = wrong[0].tolist()
    callers = (frame.f_locals.get("self") for frame in frames[: places[-1]])
    modules = [each for each in callers if isinstance(each, nn.Module)]
    paths = {part: path for root in modules[:1] for path, part in root.named_modules()}
    path = paths.get(modules[-1], "") if modules else ""
    of = f"'{path}'" if path else "a lookup"
    return WrongId(of, place[0] if len(place) == 1 else place, (rows, int(ids[tuple(place)])))
