"""A module whose lookups begin with its forward, beside itself on one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from embedding_tasks import RATE, Bags, Rows
from table_tasks import Keyed, apart
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.core.errors import InputError, PeerError, RunError
from shardwright.core.measurement import Meeting
from shardwright.job.plan import Plan
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.guard import Guard
from shardwright.runtime.probe import Probe

STEPS = 4
Batch = tuple[torch.Tensor, Keyed, Keyed, torch.Tensor]


class Late(nn.Module):
    """A dense part that runs first, two collections, a bag and an embedding, then the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Linear(3, 4)
        self.bags, self.rows = Bags(), Rows()
        self.seen = nn.EmbeddingBag(11, 4, mode="mean")
        self.user = nn.Embedding(5, 8)
        self.top = nn.Linear(4, 1)
        self.uses = ("bags", "rows", "seen", "user")

    def forward(
        self, dense: torch.Tensor, features: Keyed, sequence: Keyed, *, seen: torch.Tensor
    ) -> torch.Tensor:
        x = self.bottom(dense)
        if "bags" in self.uses:
            pooled = self.bags(features)
            x = x + pooled["a"] + pooled["b"][:, :4] * pooled["c"][:, 4:]
        if "rows" in self.uses:
            rows = self.rows(sequence)["d"]
            x = x + (rows if isinstance(rows, torch.Tensor) else rows.values()).mean(0)
        if "seen" in self.uses:
            x = x + self.seen(seen)
        if "user" in self.uses:
            x = x * self.user(seen[:, 0] % 5).mean()  # ids that the model makes itself
        return self.top(x).square().mean()  # type: ignore[no-any-return]


def batch(rank: int, step: int, empty: bool = False) -> Batch:
    """What a rank is given; all its bags are empty if asked."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    given = {}
    for name, rows in {"a": 9, "b": 7, "c": 7, "d": 6}.items():
        lengths = torch.randint(0, 4, (3,), generator=draw) * (not empty or name == "d")
        lengths[0] += name == "d"
        ids = torch.randint(rows, (int(lengths.sum()),), generator=draw)
        given[name] = (ids, nn.functional.pad(lengths.cumsum(0), (1, 0)))
    seen = torch.randint(11, (3, 2), generator=draw)
    features = Keyed({name: given[name] for name in "abc"})
    return torch.randn(3, 3, generator=draw), features, Keyed({"d": given["d"]}), seen


def called(model: nn.Module, given: Batch) -> torch.Tensor:
    *first, seen = given
    loss: torch.Tensor = model(*first, seen=seen)
    return loss


class Log(Probe):
    """What happened, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def collective(self, label: str, nbytes: int) -> None:
        self.words.append(label)

    def met(self, meeting: Meeting) -> None:
        self.words.append(f"{meeting.label} done")


def _sharded(mesh: DeviceMesh, made: Plan, **options: Any) -> tuple[nn.Module, Log]:
    model = sw.shard_embeddings(Late(), made, mesh, learning_rate=RATE, **options)
    log = Log()
    for part in model.modules():
        if isinstance(part, ShardedTables):
            part.comm.probe = log
    model.bottom.register_forward_hook(lambda *_: log.words.append("bottom"))  # type: ignore
    model.bottom.register_full_backward_hook(lambda *_: log.words.append("back"))  # type: ignore
    return model, log


def trained(
    mesh: DeviceMesh, made: Plan, optimizer: str, ids: bool, guarded: bool
) -> tuple[dict[str, float], list[str]]:
    """How far losses, the dense part and tables are from those of one process with the batches of
    all ranks, one of which has empty ones; and what happened in the last step but one."""
    guard = Guard(mesh) if guarded else None
    model, log = _sharded(mesh, made, optimizer=optimizer, guard=guard, overlap=True)
    alone = Late()
    rules = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    dense = ("top", "bottom")
    tables = [p for n, p in alone.named_parameters() if not n.startswith(dense)]
    rest = {"eps": 1e-8} if optimizer == "adagrad" else {}
    true = rules[optimizer](tables, RATE, **rest)
    far = {"loss": 0.0, "bottom": 0.0}
    batches = [[batch(r, step, empty=r == 1) for r in range(mesh.size())] for step in range(STEPS)]
    own = [each[mesh.get_rank()] for each in batches]
    for step, every in enumerate(batches):
        log.words.clear() if step < STEPS - 1 else None
        loss = called(model, own[step])
        if ids and step + 1 < STEPS:
            *first, seen = own[step + 1]
            sw.start_sparse_data_dist(model, *first, seen=seen)
        loss.backward()
        if guard is not None:
            guard.settle()
        if step == STEPS - 2:
            words = list(log.words)
        for rank, given in enumerate(every):
            before = None if alone.bottom.weight.grad is None else alone.bottom.weight.grad.clone()
            beside = called(alone, given) / mesh.size()
            beside.backward()
            if rank == mesh.get_rank():
                far["loss"] = max(far["loss"], apart(loss, beside * mesh.size()))
                after = alone.bottom.weight.grad
                assert after is not None
                one = (after if before is None else after - before) * mesh.size()
                bottom: Any = model.bottom
                far["bottom"] = max(far["bottom"], apart(bottom.weight.grad, one))
        true.step()
        for module in (alone, model):
            module.zero_grad()
    found = sw.full_state_dict(model)
    return far | {
        name: apart(found[name], value) for name, value in alone.state_dict().items()
    }, words


def odd_steps(mesh: DeviceMesh, made: Plan) -> list[float]:
    """After each odd step, how far what the next one gives is from a model that takes no odd ones:
    rows that are not used, none that are asked for, no gradients, ids changed in between, a
    forward that fails after it began."""
    rank = mesh.get_rank()
    model, _ = _sharded(mesh, made, optimizer="sgd", overlap=True)
    plain, _ = _sharded(mesh, made, optimizer="sgd")
    models: Any = (model, plain)
    far = []

    def step(number: int) -> None:
        losses = [called(each, batch(rank, number)) for each in models]
        for loss in losses:
            loss.backward()
        far.append(apart(*losses))

    step(0)
    for uses in (("rows",), ()):  # lookups begin and nobody wants their rows
        for each in models:
            each.uses = uses
        step(1)
    for each in models:
        each.uses = ("bags", "rows", "seen", "user")
    step(2)
    with torch.no_grad():
        far.append(apart(*(called(each, batch(rank, 3)) for each in models)))
    for each in models:
        handle = each.bottom.register_forward_pre_hook(_fail)
        try:
            called(each, batch(rank, 4))
        except ArithmeticError:
            handle.remove()
    step(5)
    changed = [batch(rank, 6) for _ in models]
    losses = []
    for each, given in zip(models, changed, strict=True):
        handle = each.bottom.register_forward_hook(partial(_zero, given[3]))
        losses.append(called(each, given))
        losses[-1].backward()
        handle.remove()
    far.append(apart(*losses))
    step(7)
    return far


def _zero(ids: torch.Tensor, *_: Any) -> None:
    ids.zero_()


def _fail(*_: Any) -> None:
    raise ArithmeticError


def wrong_ahead(mesh: DeviceMesh, made: Plan) -> tuple[bool, str, str]:
    """Bad ids of a batch to come on the last rank: whether the batch before them trains, what is
    said of them, and what of the batch after them is."""
    rank = mesh.get_rank()
    model, _ = _sharded(mesh, made, optimizer="sgd", overlap=True)
    called(model, batch(rank, 0)).backward()
    coming = batch(rank, 2)
    if rank == mesh.size() - 1:
        coming[3][1, 1] = 11
    loss = called(model, batch(rank, 1))
    *first, seen = coming
    sw.start_sparse_data_dist(model, *first, seen=seen)
    loss.backward()
    said = ["accepted", "accepted"]
    for place, given in enumerate((coming, batch(rank, 3))):
        try:
            called(model, given).backward()
        except (InputError, PeerError) as error:
            said[place] = f"{type(error).__name__}: {error}"
    return bool(loss.isfinite()), said[0], said[1]


def without_overlap(mesh: DeviceMesh, made: Plan) -> str:
    """What is said where ids of a batch to come have nowhere to go."""
    model, _ = _sharded(mesh, made, optimizer="sgd")
    try:
        sw.start_sparse_data_dist(model, *batch(0, 0))
    except InputError as error:
        return str(error)
    return "accepted"


def not_finite(mesh: DeviceMesh, made: Plan, guarded: bool) -> tuple[str, float]:
    """What is said of gradients of one rank that are not finite, and how far a step after that is
    from that of a model which never had them."""
    rank = mesh.get_rank()
    options: dict[str, Any] = {"optimizer": "sgd", "overlap": True}
    guard = Guard(mesh) if guarded else None
    model, _ = _sharded(mesh, made, guard=guard, **options)
    plain, _ = _sharded(mesh, made, **options)
    said = ""
    try:
        (called(model, batch(rank, 0)) * (float("inf") if rank else 1.0)).backward()
        if guard is not None:
            guard.settle()
    except RunError as error:
        said = str(error)
    model.zero_grad()
    losses = []
    for step in (1, 2):
        for each in (model, plain):
            loss = called(each, batch(rank, step))
            loss.backward()
            if each is model and guard is not None:
                guard.settle()
            losses.append(loss.detach())
    return said, max(apart(a, b) for a, b in zip(losses[::2], losses[1::2], strict=True))
