"""What the pool's workers do with collectives alone. Tasks that make groups run on all four."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import PeerError
from shardwright.runtime.comm import Comm, Peers, Pending, ways
from shardwright.runtime.comm.torch_groups import wait_limit
from shardwright.runtime.probe import Probe

FORCED = {"all_gather": "point_to_point", "reduce_scatter": "all_to_all"}


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype in (torch.float32, torch.bfloat16):
        return torch.randn(count, generator=generator).to(dtype)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def reference(size: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The sum over ranks in fp64."""
    return sum(
        (values(rank, count, dtype, seed).double() for rank in range(size)),
        torch.zeros(count, dtype=torch.float64),
    )


def same_bytes(found: torch.Tensor, true: torch.Tensor) -> bool:
    return bool(found.view(torch.uint8).equal(true.view(torch.uint8)))


def finish(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()
        pending.wait()


def each(mesh: DeviceMesh, of: Callable[..., Any], given: list[dict[str, Any]]) -> list[Any]:
    """What a task finds with each of the arguments that are ``given``."""
    return [of(mesh, **arguments) for arguments in given]


def gathers(mesh: DeviceMesh, dtype: torch.dtype, paths: Any, wait: bool, count: int) -> Any:
    """(right, in place right, version untouched)."""
    comm = Comm(mesh, paths=paths)
    true = torch.cat([values(rank, count, dtype) for rank in range(comm.size)])
    full = torch.zeros(true.nbytes, dtype=torch.uint8).view(dtype)
    before = full._version
    finish(comm.all_gather("gather", full, values(comm.rank, count, dtype), wait=wait))
    after = full._version
    again = torch.zeros(true.nbytes, dtype=torch.uint8).view(dtype)
    own = again[comm.rank * count : (comm.rank + 1) * count]
    own.copy_(values(comm.rank, count, dtype))
    finish(comm.all_gather("gather in place", again, own, wait=wait))
    return same_bytes(full, true), same_bytes(again, true), before == after


def reductions(mesh: DeviceMesh, dtype: torch.dtype, paths: Any, wait: bool, count: int) -> Any:
    """Reduced and true parts of reduce_scatter and all_reduce, in fp64; the inputs' survival."""
    comm = Comm(mesh, paths=paths)
    full = values(comm.rank, comm.size * count, dtype)
    true = reference(comm.size, comm.size * count, dtype)
    shard = torch.full((count,), 7.0).to(dtype)
    finish(comm.reduce_scatter("scatter", shard, full, wait=wait))
    kept = full.equal(values(comm.rank, comm.size * count, dtype))
    finish(comm.all_reduce("reduce", full, wait=wait))
    own = true[comm.rank * count : (comm.rank + 1) * count]
    return (shard.double(), own), (full.double(), true), kept


def sums_in_rank_order(mesh: DeviceMesh, count: int) -> bool:
    """Whether the all-to-all way adds rank 0 first, then 1, and so on, bit for bit."""
    comm = Comm(mesh, paths={"reduce_scatter": "all_to_all"})
    parts = [values(rank, comm.size * count, torch.float32) for rank in range(comm.size)]
    shard = torch.empty(count)
    comm.reduce_scatter("scatter", shard, parts[comm.rank])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return shard.equal(total[comm.rank * count : (comm.rank + 1) * count])


class Keeping(Probe):
    """Holds what it hears of as long as it lives, as a thread of gloo may for a while."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def holds(self, tensor: torch.Tensor, kind: str) -> None:
        self.kept.append(tensor)


def bytes_held_after_a_sum(mesh: DeviceMesh, count: int) -> tuple[list[int], list[int]]:
    """Bytes of what arrived, before the wait for the all-to-all way and after it."""
    probe = Keeping()
    comm = Comm(mesh, paths={"reduce_scatter": "all_to_all"}, probe=probe)
    full = values(comm.rank, comm.size * count, torch.float32)
    pending = comm.reduce_scatter("scatter", torch.empty(count), full, wait=False)
    before = [tensor.untyped_storage().nbytes() for tensor in probe.kept]
    finish(pending)
    return before, [tensor.untyped_storage().nbytes() for tensor in probe.kept]


def several_at_once(mesh: DeviceMesh, paths: Any) -> list[bool]:
    """Gathers and reductions all issued before the first is waited for, in another order."""
    comm = Comm(mesh, paths=paths)
    count, rounds = 5000, 4
    under_way: list[Pending] = []
    checks: list[Callable[[], bool]] = []
    for seed in range(rounds):
        full = torch.empty(comm.size * count)
        shard = torch.empty(count)
        true = torch.cat([values(r, count, torch.float32, seed) for r in range(comm.size)])
        whole = reference(comm.size, comm.size * count, torch.float32, seed)
        own = whole[comm.rank * count : (comm.rank + 1) * count]
        mine = values(comm.rank, comm.size * count, torch.float32, seed)
        gather = comm.all_gather(
            f"gather {seed}", full, values(comm.rank, count, torch.float32, seed), wait=False
        )
        scatter = comm.reduce_scatter(f"scatter {seed}", shard, mine, wait=False)
        assert gather is not None
        assert scatter is not None
        under_way += [gather, scatter]
        checks.append(lambda full=full, true=true: full.equal(true))
        checks.append(lambda s=shard, o=own: torch.allclose(s.double(), o, atol=1e-6))
    del full, shard, mine, gather, scatter
    gc.collect()
    for pending in reversed(under_way):
        pending.wait()
    return [check() for check in checks]


def dropped(mesh: DeviceMesh) -> bool:
    """Whether gathers are right after one by letters was dropped without a wait."""
    comm = Comm(mesh, paths=FORCED)
    for seed in range(3):
        shard = values(comm.rank, 200_000, torch.float32, seed)
        comm.all_gather("dropped", torch.empty(comm.size * 200_000), shard, wait=False)
    gc.collect()
    shard = values(comm.rank, 1000, torch.float32)
    full = torch.empty(comm.size * 1000)
    comm.all_gather("after", full, shard)
    return full.equal(torch.cat([values(r, 1000, torch.float32) for r in range(comm.size)]))


def uneven(mesh: DeviceMesh, sizes: list[int], dtype: torch.dtype) -> Any:
    comm = Comm(mesh)
    sizes = sizes[: comm.size]
    before = comm.sequence
    found = comm.gather_uneven("uneven", values(comm.rank, sizes[comm.rank], dtype), sizes)
    true = torch.cat([values(rank, size, dtype) for rank, size in enumerate(sizes)])
    return found.dtype == dtype and same_bytes(found, true), comm.sequence - before


def broadcasts(mesh: DeviceMesh, dtype: torch.dtype) -> list[bool]:
    comm = Comm(mesh)
    right = []
    for source in range(comm.size):
        tensor = values(comm.rank, 12, dtype, source).view(3, 4)
        comm.broadcast("broadcast", tensor, source)
        right.append(same_bytes(tensor.view(-1), values(source, 12, dtype, source)))
    return right


def exchange(mesh: DeviceMesh) -> bool:
    """Rank r sends k+1 elements r*10+k to rank k."""
    comm = Comm(mesh)
    sent = torch.cat([torch.full((k + 1,), 10.0 * comm.rank + k) for k in range(comm.size)])
    received = torch.empty(comm.size * (comm.rank + 1))
    comm.all_to_all(
        "exchange",
        received,
        sent,
        [comm.rank + 1] * comm.size,
        [k + 1 for k in range(comm.size)],
    )
    true = [torch.full((comm.rank + 1,), 10.0 * r + comm.rank) for r in range(comm.size)]
    return received.equal(torch.cat(true))


def error_of(task: Callable[[], object]) -> str:
    try:
        task()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(mesh: DeviceMesh, what: str) -> str:
    comm = Comm(mesh)
    calls: dict[str, Callable[[], object]] = {
        "narrow": lambda: comm.narrow(3),
        "uneven": lambda: comm.gather_uneven("u", torch.zeros(2), [3] * comm.size),
        "path": lambda: Comm(mesh, paths={"all_gather": "all_to_all"}),
        "path name": lambda: Comm(mesh, paths="fastest"),
    }
    return error_of(calls[what])


def narrowed(mesh: DeviceMesh, ranks: int) -> Any:
    """(rank, size, what is gathered, whether a second call gives the same group)."""
    comm = Comm(mesh)
    block = comm.narrow(ranks)
    full = torch.empty(ranks)
    block.all_gather("narrow", full, torch.tensor([float(comm.rank)]))
    again = Comm(mesh).narrow(ranks)
    return block.rank, block.size, full.tolist(), again.group is block.group


def two_dimensions(mesh: DeviceMesh, shape: tuple[int, int], wait: bool) -> Any:
    """What a 2-D mesh of all four ranks gathers and sums, and the facts of its Comm."""
    both = DeviceMesh("cpu", torch.arange(4).view(shape), mesh_dim_names=("replicate", "shard"))
    comm = Comm(both)
    me, count = dist.get_rank(), 6
    full = torch.empty(comm.size * count)
    finish(comm.all_gather("gather", full, torch.full((count,), float(me)), wait=wait))
    gathered = full[::count].tolist()
    shard = torch.empty(count)
    whole = values(me, comm.size * count, torch.float32)
    finish(comm.reduce_scatter("scatter", shard, whole, wait=wait))
    true = reference(4, comm.size * count, torch.float32)
    own = true[comm.rank * count : (comm.rank + 1) * count]
    everyone, inside = torch.ones(1), torch.ones(1)
    finish(comm.all_reduce("sum", everyone, wait=wait))
    finish(comm.all_reduce("sum inside", inside, wait=wait, replicas=False))
    top = torch.tensor([float(me), -float(me)])
    finish(comm.all_reduce("largest", top, wait=wait, largest=True))
    assert top.tolist() == [3.0, 0.0]
    comm.agree("two dimensions", {"shape": repr(shape)})
    differs = error_of(lambda: comm.agree("two dimensions", {"rank": str(me == 2)}))
    replicas = comm.twins.group if comm.twins is not None and comm.sums_in_two else None
    facts = (comm.rank, comm.size, comm.total, dist.get_world_size(replicas))
    return facts, gathered, (shard.double(), own), (everyone.item(), inside.item()), differs


def bad_meshes(mesh: DeviceMesh) -> Any:
    names = ("pipe", "replicate", "shard")
    cube = DeviceMesh("cpu", torch.arange(4).view(1, 2, 2), mesh_dim_names=names)
    others = DeviceMesh("cpu", [2, 3])
    return error_of(lambda: Comm(cube)), error_of(lambda: Comm(others))


class Counting(Probe):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def collective(self, label: str, nbytes: int) -> None:
        self.seen.append((label, nbytes))


def counted(mesh: DeviceMesh) -> Any:
    """Two Comms of one group count together; each tells its own probe."""
    probe = Counting()
    one, other = Comm(mesh, probe), Comm(mesh)
    start = one.sequence
    one.all_reduce("mine", torch.zeros(3))
    other.all_reduce("other's", torch.zeros(3))
    other.step = 12
    return one.sequence - start, other.sequence == one.sequence, one.step, probe.seen


def alone(_mesh: DeviceMesh) -> Any:
    """One rank needs no process group at all."""
    peers = Peers(None, "cpu")
    full, shard = torch.zeros(4), torch.arange(4.0)
    finish(peers.all_gather("gather", full, shard, wait=False))
    back = torch.zeros(4)
    peers.reduce_scatter("scatter", back, full)
    peers.all_reduce("sum", back)
    peers.prepare(2**30)
    return full.equal(shard), back.equal(shard), peers.paths, full._version, peers.sequence


def probed(mesh: DeviceMesh) -> Any:
    """What a probe finds, and what a gather and a sum give on those ways."""
    group = dist.new_group(list(range(mesh.size())))
    comm = Comm(DeviceMesh.from_group(group, "cpu"))
    comm.prepare(2**20 - 1)
    before, sequence = comm.paths, comm.sequence
    comm.prepare(2**20)
    comm.prepare(2**30)
    count = 300_000
    full, shard = torch.empty(comm.size * count), values(comm.rank, count, torch.float32)
    comm.all_gather("gather", full, shard)
    right = full.equal(torch.cat([values(r, count, torch.float32) for r in range(comm.size)]))
    whole = values(comm.rank, comm.size * count, torch.float32)
    comm.reduce_scatter("scatter", shard, whole)
    true = reference(comm.size, comm.size * count, torch.float32)
    own = true[comm.rank * count : (comm.rank + 1) * count]
    shared = Comm(comm.mesh).paths == comm.paths
    forced = Comm(comm.mesh, paths="backend").paths
    sums = torch.allclose(shard.double(), own, atol=1e-5)
    return before, sequence, comm.paths, right and sums, shared, forced


def sized_ways(_mesh: DeviceMesh) -> Any:
    paths = ways.Paths(((2**20, "point_to_point"), (2**24, "backend")))
    found = [ways.way_at(paths.all_gather, n) for n in (2**20 - 1, 2**20, 2**24)]
    return found, paths.table()


def checked_ones(mesh: DeviceMesh) -> int:
    """Every collective, compared first; the count of collectives they took."""
    comm = Comm(mesh, checked=True)
    start = comm.sequence
    one, full = torch.ones(2), torch.empty(2 * comm.size)
    comm.all_gather("gather", full, one)
    comm.reduce_scatter("scatter", one, full)
    comm.all_reduce("sum", one)
    comm.broadcast("broadcast", one, 0)
    comm.all_to_all("exchange", torch.empty_like(full), full)
    comm.gather_uneven("uneven", torch.ones(comm.rank + 1), [r + 1 for r in range(comm.size)])
    into, out = [r + 1 for r in range(comm.size)], [comm.rank + 1] * comm.size
    comm.all_to_all("uneven exchange", torch.empty(sum(into)), torch.ones(sum(out)), into, out)
    return comm.sequence - start


def disagreeing(mesh: DeviceMesh, how: str) -> str:
    """The last rank does something else than the others; a wrong sum shows as ``nothing``."""
    comm = Comm(mesh, checked=True)
    odd = comm.rank == comm.size - 1
    full, shard = torch.zeros(4 * comm.size), torch.zeros(4)

    def call() -> None:
        if how == "order":
            for name in ("second", "first") if odd else ("first", "second"):
                comm.all_reduce(f"layers.{name} reduce", torch.zeros(4))
        elif how == "size":
            comm.all_reduce("reduce", torch.zeros(5 if odd else 4))
        elif odd:
            comm.reduce_scatter("unit", shard, full)
        else:
            comm.all_gather("unit", full, shard)

    found = error_of(call)
    comm.all_reduce("after", shard)
    return found


def short_lived(mesh: DeviceMesh, seconds: float) -> dist.ProcessGroup:
    return dist.new_group(list(range(mesh.size())), timeout=timedelta(seconds=seconds))


def absent(mesh: DeviceMesh, kind: str, paths: Any) -> Any:
    """Rank 1 stays away until the others have given it up; what they say, and say again."""
    comm = Comm(DeviceMesh.from_group(short_lived(mesh, 1.5), "cpu"), paths=paths)
    comm.all_reduce("warm", torch.zeros(4))
    comm.step = 7
    if comm.rank == 1:
        dist.barrier(mesh.get_group())
        return None
    full, shard = torch.zeros(4 * comm.size), torch.zeros(4)
    calls: dict[str, Callable[[], Pending | None]] = {
        "all_gather": lambda: comm.all_gather("layers.3 gather", full, shard, wait=False),
        "reduce_scatter": lambda: comm.reduce_scatter("layers.3 reduce", shard, full, wait=False),
        "all_reduce": lambda: comm.all_reduce("layers.3 reduce", shard, wait=False),
    }
    try:
        finish(calls[kind]())
    except PeerError as error:
        text, caused = str(error), type(error.__cause__).__name__
    again = error_of(lambda: finish(calls[kind]()))
    dist.barrier(mesh.get_group())
    return text, caused, again


def gone(mesh: DeviceMesh) -> Any:
    """Rank 1 closes its connections; ranks that do not talk to it must not be blamed."""
    group = short_lived(mesh, 6)
    peers = Peers(group, "cpu")
    peers.all_reduce("warm", torch.zeros(4))
    if peers.rank == 1:
        time.sleep(0.5)
        del peers
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return None
    return error_of(lambda: peers.all_gather("embed gather", torch.zeros(16), torch.zeros(4)))


def astray(mesh: DeviceMesh) -> str:
    """Rank 1 waits in another collective than the rest, and says in which."""
    comm = Comm(DeviceMesh.from_group(short_lived(mesh, 1.5), "cpu"))
    comm.all_reduce("warm", torch.zeros(4))
    if comm.rank == 1:
        return error_of(lambda: comm.broadcast("head gather", torch.zeros(64), 1 - comm.rank))
    return error_of(lambda: comm.all_reduce("layers.0 reduce", torch.zeros(64)))


def own_mistake(mesh: DeviceMesh) -> str:
    comm = Comm(mesh)
    return error_of(lambda: comm.all_gather("gather", torch.zeros(3, 3).t(), torch.zeros(1)))


def limits(_mesh: DeviceMesh) -> Any:
    """A sub-mesh's group has torch's bound until a Comm uses it; a bound that is named holds."""
    plain = DeviceMesh.from_group(dist.new_group(list(range(4))), "cpu")
    before = wait_limit(plain.get_group())
    inherited = Comm(plain).limit
    named = Comm(plain, timeout=timedelta(seconds=9)).limit
    chosen = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=50)), "cpu")
    kept = Comm(chosen).limit
    blocks = wait_limit(Comm(plain).narrow(2).group)
    found = (before, inherited, named, kept, blocks)
    return [None if limit is None else limit.total_seconds() for limit in found]


def late_limit(mesh: DeviceMesh) -> Any:
    """A bound that is set after the connections are made also bounds letters."""
    comm = Comm(DeviceMesh.from_group(short_lived(mesh, 15), "cpu"))
    comm.all_reduce("warm", torch.zeros(4))
    comm = Comm(comm.mesh, paths=FORCED, timeout=timedelta(seconds=1.5))
    if comm.rank == 1:
        dist.barrier(mesh.get_group())
        return None
    text = error_of(lambda: comm.all_gather("gather", torch.zeros(16), torch.zeros(4)))
    dist.barrier(mesh.get_group())
    return text


def maxima(mesh: DeviceMesh, wait: bool) -> list[float]:
    comm = Comm(mesh)
    tensor = torch.tensor([float(comm.rank), -float(comm.rank)])
    finish(comm.all_reduce("largest", tensor, wait=wait, largest=True))
    return tensor.tolist()
