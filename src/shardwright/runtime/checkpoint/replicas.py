"""Who writes a part that several ranks hold."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.runtime.checkpoint.agreement import Group, rank_and_size, total
from shardwright.runtime.checkpoint.held import Held
from shardwright.runtime.checkpoint.shard import piece_of


class Claim(NamedTuple):
    """A part by the first 8 bytes of its description's sha256, and its bytes."""

    part: int
    nbytes: int


def claim(held: Held) -> Claim:
    """What the other ranks get to know about a part."""
    text = repr(piece_of(held)).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    return Claim(number, held.tensor.numel() * held.tensor.element_size())


def writers(claims: Sequence[Sequence[Claim]]) -> list[set[int]]:
    """The parts that each rank writes: each part once.

    Large parts go first, each to the rank among its holders that has least to write so far, so
    the answer is the same wherever it is worked out.
    """
    holders: dict[Claim, list[int]] = defaultdict(list)
    for rank, parts in enumerate(claims):
        for part in parts:
            holders[part].append(rank)
    load = [0] * len(claims)
    chosen: list[set[int]] = [set() for _ in claims]
    for part in sorted(holders, key=lambda c: (len(holders[c]) > 1, -c.nbytes, c.part)):
        rank = min(holders[part], key=lambda r: (load[r], r))
        load[rank] += part.nbytes
        chosen[rank].add(part.part)
    return chosen


def without_copies(held: Sequence[Held], comm: Group | None) -> list[Held]:
    """Of what this rank holds, the parts that it has to write. Called by all ranks."""
    rank, size = rank_and_size(comm)
    if comm is None or size == 1:
        return list(held)
    own = [claim(part) for part in held]
    counts = total(comm, "count parts", {rank: len(own)}, size).tolist()
    first = 2 * sum(counts[:rank])
    numbers = {first + i: n for i, n in enumerate(n for part in own for n in part)}
    everyone = iter(total(comm, "list parts", numbers, 2 * sum(counts)).tolist())
    claims = [[Claim(next(everyone), next(everyone)) for _ in range(n)] for n in counts]
    mine = writers(claims)[rank]
    return [part for part, number in zip(held, own, strict=True) if number.part in mine]
