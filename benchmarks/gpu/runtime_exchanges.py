"""Collectives: those of one rank of NCCL, and what one rank cannot show, by two processes that
share the card, over gloo."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from gpu.rows import Row, Setting, group_of_one
from gpu.runtime_units import Trained, apart, flat_adamw, ours, plain, size_of, step, whole
from shardwright.runtime.comm import Comm
from shardwright.runtime.comm.torch_groups import Operations

RANKS = 2
WAIT = 20.0  # seconds that a rank waits for the other in one collective
PATIENCE = 60.0  # that both have in all
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64)


def numbers(device: str, dtype: torch.dtype, rank: int, count: int) -> torch.Tensor:
    """What a rank gives: small whole numbers, so that sums are exact."""
    return (torch.arange(count, device=device) % 11 + rank).to(dtype)


def operations(device: str, rank: int, size: int) -> dict[str, Callable[[torch.dtype, bool], Any]]:
    """Collectives of the default group as the runtime calls them: each gives what came and what
    should have."""
    group = dist.group.WORLD
    assert group is not None, "a group"
    asked, n = Operations(group), 8
    every = range(size)

    def given(dtype: torch.dtype, of: int = rank) -> torch.Tensor:
        return numbers(device, dtype, of, n * size)

    def done(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    def all_gather(dtype: torch.dtype, wait: bool) -> Any:
        own = given(dtype)[:n].clone()
        full = own.new_empty(n * size)
        done(asked.all_gather(full.view(torch.uint8), own.view(torch.uint8), wait))
        return full, torch.cat([given(dtype, r)[:n] for r in every])

    def reduce_scatter(dtype: torch.dtype, wait: bool) -> Any:
        full = given(dtype)
        share = full.new_empty(n)
        done(asked.reduce_scatter(share, full, wait))
        part = slice(rank * n, rank * n + n)
        return share, torch.stack([given(dtype, r)[part] for r in every]).sum(0).to(dtype)

    def all_reduce(dtype: torch.dtype, wait: bool, largest: bool = False) -> Any:
        tensor = given(dtype)
        done(asked.all_reduce(tensor, wait, largest))
        stack = torch.stack([given(dtype, r) for r in every])
        return tensor, (stack.amax(0) if largest else stack.sum(0)).to(dtype)

    def all_to_all(dtype: torch.dtype, wait: bool) -> Any:
        cuts = [n // 2, *[n] * (size - 1)]  # of every rank, to the others in order
        sent = given(dtype)[: sum(cuts)].clone()
        received = sent.new_empty(cuts[rank] * size)
        done(asked.all_to_all(received, sent, [cuts[rank]] * size, cuts, wait))
        begin = sum(cuts[:rank])
        return received, torch.cat([given(dtype, r)[begin : begin + cuts[rank]] for r in every])

    def broadcast(dtype: torch.dtype, wait: bool) -> Any:
        tensor = given(dtype)
        done(asked.broadcast(tensor, size - 1, wait))
        return tensor, given(dtype, size - 1)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "all_reduce max": partial(all_reduce, largest=True),
        "all_to_all": all_to_all,
        "broadcast": broadcast,
    }


def checked(
    run: Callable[[torch.dtype, bool], Any], dtypes: Sequence[torch.dtype] = DTYPES
) -> dict[str, str]:
    """By dtype "equal", "differs", or what was raised; waited for at once and later."""
    found = {}
    for dtype in dtypes:
        for wait in (True, False):
            name = f"{str(dtype).removeprefix('torch.')}{'' if wait else ' later'}"
            try:
                came, wanted = run(dtype, wait)
                found[name] = "equal" if torch.equal(came, wanted) else "differs"
            except RuntimeError as error:
                found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def alone(setting: Setting, name: str) -> dict[str, Any]:
    """A collective of one rank: of NCCL on a GPU."""
    with group_of_one(setting):
        init_device_mesh(setting.device, (1,))
        return checked(operations(setting.device, 0, 1)[name])


def comm_alone(setting: Setting) -> dict[str, Any]:
    """What the runtime's own collectives of one rank give, where nothing has to travel."""
    with group_of_one(setting):
        comm = Comm(init_device_mesh(setting.device, (1,)))
        own = numbers(setting.device, torch.float32, 0, 16)
        found = {"backend": comm.config, "on_host": comm.on_host, "agrees": comm.agree("a", {})}
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            target = torch.empty_like(own)
            pending = getattr(comm, name)(name, target, own, wait=False)
            pending.wait()
            found[name] = torch.equal(target, own)
        copy = own.clone()
        comm.all_reduce("sum", copy)
        comm.broadcast("broadcast", copy, 0)
        found["all_reduce"] = torch.equal(copy, own)
        found["gather_uneven"] = torch.equal(comm.gather_uneven("uneven", own, [16]), own)
        comm.meet("here", "to see", "")
    return found


# ---- two ranks on one card -----------------------------------------------------------------------


def two_ranks(setting: Setting) -> dict[str, Any]:
    """What rank 0 of two processes found; they end by themselves, whatever becomes of this one."""
    with tempfile.TemporaryDirectory() as folder:
        size = "small" if setting.small else "whole"
        command = [sys.executable, "-m", "gpu.runtime_exchanges", setting.device, size, folder]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
        try:
            codes = [each.wait(PATIENCE + WAIT) for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()
        answer = Path(folder) / "0.json"
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    return {"exit_codes": codes, **found}


def rank_of_two(setting: Setting, folder: Path, rank: int) -> None:
    """One of them: every collective, then training on its half of the batches."""
    if setting.device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=WAIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    found: dict[str, Any] = {}

    def put(name: str, run: Callable[[], Any]) -> None:
        try:
            found[name] = run()
        except Exception as error:  # what both ranks have, or one, whose peer waits and ends, too
            found[name] = f"{type(error).__name__}: {error}"[:500]
        (folder / f"{rank}.json").write_text(json.dumps(found))

    for name, run in operations(setting.device, rank, RANKS).items():
        put(name, partial(checked, run, DTYPES[:2] if setting.small else DTYPES))
    cases: dict[str, dict[str, Any]] = {
        f"{strategy} zero {zero}": {"shard_strategy": strategy, "zero": zero}
        for strategy in ("flat", "per_param", "param_boundary")
        for zero in (3, 2, 1)
    }
    cases |= {"replicated": {"placements": (sw.Replicate(),)}, "offloaded": {"cpu_offload": True}}
    kinds = ["row_wise", "table_wise", "column_wise", "data_parallel"]
    for name, options in islice(cases.items(), 1 if setting.small else None):
        put(f"fp32 {name}", partial(_half, setting, rank, options))
    for kind in kinds[: 1 if setting.small else None]:
        put(f"tables {kind}", partial(_tables, setting, rank, kind))
    dist.destroy_process_group()


def _half(setting: Setting, rank: int, options: dict[str, Any]) -> dict[str, float]:
    """Training on half of every batch, beside the plain module on all of it."""
    size = size_of(setting)
    model: Any = size.model(setting)
    ours(model, init_device_mesh(setting.device, (RANKS,)), **options)
    optimizer, losses = flat_adamw(model), []
    for batch in size.batches(setting, 4):
        optimizer.zero_grad()
        loss = step(model, [part.chunk(RANKS)[rank] for part in batch]).detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / RANKS)
        optimizer.step()
    named = dict(model.named_parameters())
    gradients = {name: whole(p.grad) for name, p in named.items()}
    weights = {name: whole(p) for name, p in named.items()}
    return Trained(losses, gradients, weights).beside(plain(setting))


def _tables(setting: Setting, rank: int, kind: str) -> dict[str, float]:
    """Rows of tables on two ranks after some updates, beside plain ones with both batches."""
    from gpu.runtime_tables import Tables

    tables = Tables(2, 100, 8, 16)
    mine: Any = tables.ours(setting, init_device_mesh(setting.device, (RANKS,)), "sgd", kind)
    true = tables.bags(setting)
    optimizer = torch.optim.SGD(true.parameters(), lr=tables.rate)
    for number in range(3):
        both = [tables.asked(setting, RANKS * number + r) for r in range(RANKS)]
        tables.passes(mine, both[rank])
        optimizer.zero_grad()
        for each in both:
            tables.passes(true, each, 1 / RANKS)
        optimizer.step()
    found = {name: whole(value) for name, value in sw.full_state_dict(mine).items()}
    return {"weight_apart": apart(found, tables.weights_of(true))}


def rows(setting: Setting) -> list[Row]:
    """One rank first."""
    names: Sequence[str] = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce max")
    names = (*names, "all_to_all", "broadcast")
    found = [Row(f"one rank {name}", partial(alone, setting, name), 3) for name in names]
    found.append(Row("one rank, the runtime's own", partial(comm_alone, setting), 2))
    return [*found, Row("two ranks on one card", partial(two_ranks, setting), 40)]


if __name__ == "__main__":
    device, size, folder, rank = sys.argv[1:]
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with suppress(KeyboardInterrupt):
        rank_of_two(Setting(device, size == "small"), Path(folder), int(rank))
