"""Runs the code fences of docs/from-fsdp2.md and of docs/from-fsdp2-code.md, where its rows lead:
with FSDP2, DDP or in one process, and with ours.

Every fence begins with a comment that says whose it is. A fence of ``both`` runs as it stands on a
model that FSDP2 sharded and on one of ours.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwright as sw
from shardwright.runtime.comm import Comm
from shardwright.runtime.units.dstorage import DStorage, units_in

PAGE = Path(__file__).parents[2] / "docs" / "from-fsdp2.md"
SNIPPETS = PAGE.with_name("from-fsdp2-code.md")
GUIDE = PAGE.with_name("runtime.md")
OURS = ("here", "here only")
BOTH = ("both", "both, not flat")
THEIRS = ("FSDP2", "DDP", "one process")
REFUSED = "refused"
STRATEGIES = ("per_param", "param_boundary", "flat")
WORDS = 11


class Fence(NamedTuple):
    """A snippet, the file and the heading it stands under, and whose it is."""

    file: Path
    title: str
    who: str
    line: int
    code: str


@functools.cache
def fences() -> list[Fence]:
    """Every Python fence of the page and of what it links to, in order."""
    found = []
    for file in (PAGE, SNIPPETS):
        text = file.read_text()
        for match in re.finditer(r"^```python\n# ([^\n]*)\n(.*?)^```", text, re.S | re.M):
            before = text[: match.start()]
            title = ["The call", *re.findall(r"^## (.*)$", before, re.MULTILINE)][-1]
            line = before.count("\n") + 2
            found.append(Fence(file, title, match.group(1), line, match.group(2)))
    return found


def reference_of(fence: Fence) -> Fence | None:
    """The fence that one of ours is held against: the last of another kind before it, under the
    same heading. One of ``both`` is its own."""
    if fence.who in BOTH or fence.who == "here only":
        return fence if fence.who in BOTH else None
    earlier = fences()[: fences().index(fence)]
    under = [f for f in reversed(earlier) if (f.file, f.title) == (fence.file, fence.title)]
    return next((f for f in under if f.who in (*BOTH, *THEIRS)), None)


# ---- what the page says the snippets are given ---------------------------------------------------


class Block(nn.Module):
    """A residual block of the page's ``model.layers``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.down(functional.gelu(self.up(self.norm(states))))


class Model(nn.Module):
    """The page's ``model``."""

    def __init__(self, width: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states = self.embed(words)
        for layer in self.layers:
            states = layer(states)
        return self.head(self.norm(states))


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    words, following = batch
    return functional.cross_entropy(model(words).flatten(0, 1).double(), following.flatten())


def batches_of(rank: int, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    rows = [torch.randint(WORDS, (3, 6), generator=generator) for _ in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


IMPORTED = (AveragedModel, CPUOffloadPolicy, DistributedDataParallel, DTensor, MixedPrecisionPolicy)
IMPORTED += (RowwiseParallel, Shard, checkpoint_wrapper, contextlib, distribute_tensor, fully_shard)
IMPORTED += (functional, get_ema_multi_avg_fn, init_device_mesh, parallelize_module)


def given(mesh: DeviceMesh, folder: str) -> dict[str, Any]:
    batches = batches_of(mesh.get_rank())

    def train(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        batches: list[tuple[torch.Tensor, torch.Tensor]] = batches,
    ) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return {
        **{each.__name__.rpartition(".")[-1]: each for each in IMPORTED},
        **{name: getattr(state_dict, name) for name in state_dict.__all__},
        "Model": Model,
        "backend": "aot_eager",
        "batches": batches,
        "build": build,
        "dcp": dcp,
        "folder": folder,
        "group": mesh.get_group() if mesh.ndim == 1 else None,
        "loss_of": loss_of,
        "mesh": mesh,
        "model": build(),
        "nn": nn,
        "rank": mesh.get_rank(),
        "sw": sw,
        "torch": torch,
        "train": train,
    }


# ---- running -------------------------------------------------------------------------------------


def run(mesh: DeviceMesh, fence: Fence, strategy: str | None, folder: str) -> dict[str, Any]:
    """What a fence leaves with a strategy of ours or, with None, elsewhere: the whole model, and
    every number and tensor it has a name for."""
    names = given(mesh, folder)
    if strategy is not None:
        names["sw"] = _Cut(strategy)
    if fence.who not in THEIRS and "fully_shard" not in fence.code:
        shard(names["model"], mesh, strategy)
    exec(compile("\n" * (fence.line - 1) + fence.code, fence.file.name, "exec"), names)
    return dict(left(names))


class _Cut:
    """``shardwright`` whose ``fully_shard_flat`` has another default strategy."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(sw, name)

    def fully_shard_flat(self, *arguments: Any, **options: Any) -> Any:
        return sw.fully_shard_flat(*arguments, **{"shard_strategy": self.strategy, **options})


def shard(model: Model, mesh: DeviceMesh, strategy: str | None) -> None:
    """Every block and the root, as the page's first section does."""
    for module in (*model.layers, model):
        if strategy is None:
            fully_shard(module, mesh=mesh)
        else:
            sw.fully_shard_flat(module, mesh, shard_strategy=strategy)


def left(names: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    model = names["model"]
    units = list(units_in(model))
    for unit in units:
        DStorage(unit).reset()
    state = sw.full_state_dict(model) if units else model.state_dict()
    for name, value in state.items():
        name = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        yield name, whole(value)
    for name, value in names.items():
        if isinstance(value, float | torch.Tensor):
            yield f"<{name}>", whole(value)


def whole(value: Any) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return torch.as_tensor(value).detach().clone().double()


_REFERENCES: dict[tuple[int, Fence], dict[str, Any]] = {}  # by ranks and snippet


def compare(mesh: DeviceMesh, at: int, strategies: Sequence[str]) -> dict[str, dict[str, float]]:
    """By how much what the fence at this place leaves is off from what its reference leaves, by
    strategy and name; and how far it is from a model that nothing was done to, as ``moved``."""
    fence = fences()[at]
    other = reference_of(fence)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, 0, mesh.get_group())
        there: dict[str, Any] = {}
        if other is not None:
            key = (mesh.size(), other)
            if key not in _REFERENCES:
                _REFERENCES[key] = run(mesh, other, None, f"{shared[0]}/theirs")
            there = _REFERENCES[key]
        for strategy in strategies:
            here = run(mesh, fence, strategy, f"{shared[0]}/{strategy}")
            found[strategy] = {n: difference(here[n], there[n]) for n in here.keys() & there.keys()}
            if there:
                missing = {n for n in here.keys() ^ there.keys() if not n.startswith("<")}
                found[strategy].update(dict.fromkeys(missing, float("inf")))
                start = build().state_dict()
                own = [n for n in here if not n.startswith("<")]
                new = torch.tensor(float("inf"))
                found[strategy]["moved"] = max(difference(here[n], start.get(n, new)) for n in own)
        dist.barrier(mesh.get_group())
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max()) if one.numel() else 0.0


def guide(mesh: DeviceMesh) -> tuple[int, float, list[float], list[int]]:
    """The snippets of docs/runtime.md: how many there are, by how much the first is off from one
    process, and of the groups of the others the weight decay and the elements."""
    codes = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    names = {**given(mesh, ""), "world_size": mesh.size(), "batch": batches_of(mesh.get_rank())[0]}
    exec(codes[0], names)
    here = sw.full_state_dict(names["model"])
    reference = build()
    optimizer = torch.optim.AdamW(reference.parameters())
    for rank in range(mesh.size()):
        (loss_of(reference, batches_of(rank)[0]) / mesh.size()).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    optimizer.step()
    off = max(difference(here[n], p.detach()) for n, p in reference.named_parameters())
    for code in codes[1:]:
        # What has a plan or tables is tested where these are.
        if re.search(r"\bplan\b|start_sparse_data_dist", code):
            continue
        names["model"] = build().float() if "8bit" in code else build()  # which takes no fp64
        if not re.search(r"sw\.(Buckets|fully_shard_flat)\(", code):
            shard(names["model"], mesh, "flat")
        names["first_half"] = names["second_half"] = names["batch"]
        exec(code, names)
    decays = [group["weight_decay"] for group in names["decayed"]]
    sizes = [sum(p.numel() for p in group["params"]) for group in names["by_name"]]
    return len(codes), off, decays, sizes


def taken_while_whole(mesh: DeviceMesh, strategy: str) -> tuple[str, float]:
    """What an optimizer says that was made of gathered parameters, and how far the weights are from
    those that one made at the right time leaves afterwards."""
    model, reference = build(), build()
    for each in (model, reference):
        shard(each, mesh, strategy)
    loss = loss_of(model, batches_of(mesh.get_rank())[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the root is whole now
    loss.backward()
    try:
        optimizer.step()
        said = "nothing"
    except sw.InputError as error:
        said = str(error)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss_of(reference, batches_of(mesh.get_rank())[0]).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    here, there = sw.full_state_dict(model), sw.full_state_dict(reference)
    return said, max(difference(here[name], there[name]) for name in there)


def refuse(mesh: DeviceMesh, at: int, strategies: Sequence[str]) -> dict[str, str]:
    """What the last lines of a fence raise under strategies; what is before is accepted."""
    fence = fences()[at]
    before, _, last = fence.code.rpartition("\n\n")
    found = {}
    for strategy in strategies:
        names = {**given(mesh, ""), "sw": _Cut(strategy)}
        if "fully_shard" not in fence.code:
            shard(names["model"], mesh, strategy)
        exec(before, names)
        try:
            exec(last, names)
            found[strategy] = "nothing"
        except (sw.ShardwrightError, RuntimeError) as error:
            found[strategy] = f"{type(error).__name__}: {error}"
        for unit in units_in(names["model"]):
            DStorage(unit).reset()
        Comm(mesh).forget()
    return found
