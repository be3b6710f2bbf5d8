"""Seconds of recorded operators on an accelerator, by class, and of what a model's ranks send.

A product takes its FLOPs at the peak rate of its dtype times an efficiency that grows with the
product: ``e / (1 + h (1/m + 1/n + 1/k))``. Attention has a share of the peak of its own; every
other operator takes the bytes that it reads and writes at a share of the memory's rate. Kernels
are launched one after the other beside them: a piece takes whatever is longer, what its kernels
compute or what their launches take, and a share of the other.
"""

# Why so few constants: each says something of the machine that another model on it shares, and is
# fitted to runs that others published (``validation/published``); a constant for one framework or
# one model would make its own rows right and everyone else's wrong.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwright.core.recording import Piece
from shardwright.core.work import OperatorShapes, Sent
from shardwright.cost.dense import product_rate

NARROW_HEAD = 128  # attention kernels are at their best from here on


class WorkSeconds(NamedTuple):
    """Seconds of the operators of a piece, by class, and of what launching all of them takes."""

    products: Any
    attention: Any
    elementwise: Any
    launches: Any

    @property
    def computing(self) -> Any:
        """The device's own seconds."""
        return self.products + self.attention + self.elementwise


def piece_seconds(piece: Piece, c: Mapping[str, Any]) -> WorkSeconds:
    """What a piece computes, with the constants of an accelerator's clock."""
    work, operators = piece.work, piece.operators or OperatorShapes()
    products: Any = 0.0
    told = 0
    for each in operators.products:
        told += each.flops
        half = c["product_half_size"] * (1 / each.m + 1 / each.n + 1 / each.k)
        rate = product_rate(each.dtype, c) * c["product_efficiency"]
        products = products + each.flops / rate * (1 + half)
    attention: Any = 0.0
    for call in operators.attention:
        told += call.calls * call.flops
        narrow = min(call.head_dim / NARROW_HEAD, 1.0) ** 0.5
        attention = attention + call.calls * call.flops / (
            product_rate(call.dtype, c) * c["attention_efficiency"] * narrow
        )
    # What has FLOPs but no shape goes at the best that products reach. Of attention the sums of
    # FLOPs count what is masked, too, so beside it nothing is left over.
    untold = 0 if operators.attention else max(work.flops - told, 0)
    products = products + untold / (c["compute_rate"] * c["product_efficiency"])
    # A collective's buffers are no kernel's: they take the seconds of what is sent.
    sent = sum(each.calls * each.nbytes for each in operators.sent)
    elementwise = max(work.moved - sent, 0) / (c["memory_rate"] * c["memory_efficiency"])
    return WorkSeconds(products, attention, elementwise, work.calls * c["launch_latency"])


def link_rate(c: Mapping[str, Any]) -> Any:
    """Bytes a second of a collective among ranks of one host."""
    return c["all_gather_rate"] * c["link_efficiency"]


def network_rate(c: Mapping[str, Any]) -> Any:
    """Bytes a second of one rank to other hosts."""
    return c["inter_host_rate"] * c["network_efficiency"]


def ring_seconds(
    nbytes: Any, ranks: int, beside: int, host: int, c: Mapping[str, Any], times: int = 1
) -> Any:
    """Seconds of a collective among ``ranks`` that moves a full buffer of ``nbytes`` ``times``
    (twice for an all-reduce): at the link's rate where all of them are on one host of ``host``
    ranks, ``beside`` apart from each other, else at the rate of the hosts' networks together."""
    if ranks == 1:
        return 0.0
    rate, latency = link_rate(c), c["collective_latency"]
    if ranks * beside > host:
        # Neighbours of a host each carry a part of what crosses hosts.
        near = max(min(host // beside, ranks), 1)
        rate = min(network_rate(c) * near, rate)
        latency = latency * (1 + (ranks * beside / host) ** 0.5)
    return times * nbytes * (ranks - 1) / ranks / rate + latency


def sent_seconds(sent: Sent, ranks: int, beside: int, host: int, c: Mapping[str, Any]) -> Any:
    """Seconds of all calls of a collective of a model's own."""
    times = 2 if sent.collective == "all_reduce" else 1
    return sent.calls * ring_seconds(sent.nbytes, ranks, beside, host, c, times)
