"""A step of a rank, from a recording made by hand: two blocks of one matrix each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.core.optimizers import Optimizer, optimizer_named
from shardwright.core.recording import Piece, RecordedUnit, Recording, Touch
from shardwright.core.tensor import TensorSpec
from shardwright.heap.flat import FlatUnits
from shardwright.heap.fsdp2 import FSDP2
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Machine, Megatron, Repetition, Replicated, Sharding
from shardwright.heap.rank_step import ONE_PASS, Chunk, RankStep
from shardwright.job.pipelining import (
    SCHEDULES,
    Pass,
    PassRun,
    chunk_count,
    expanded,
    order,
    order_in_runs,
)

NUMEL = 1000
WEIGHTS = 2 * 4 * NUMEL
SAVED, PASSING = 300, 70
STREAM = 90
ADAMW = optimizer_named("adamw", "foreach")
Step = Callable[..., Ledger]


def block(number: int) -> RecordedUnit:
    return RecordedUnit(f"{number}", (TensorSpec(f"{number}.w", (NUMEL,)),))


def recording() -> Recording:
    """Each block saves something in its forward and has a gradient after its backward."""
    forward, backward = [Piece("begin", "", ())], [Piece("backward", "", ())]
    for number in (0, 1):
        saved, passing, gradient = (10 * number + k for k in range(3))
        unit = f"{number}"
        took = (
            Touch("take", passing, PASSING, "temporary", "aten.mm", unit),
            Touch("take", saved, SAVED, "activation", "aten.mm", unit),
            Touch("free", passing, PASSING, "temporary"),
        )
        forward += [Piece("enter", unit, took), Piece("leave", unit, ())]
        made = (
            Touch("take", gradient, 4 * NUMEL, "temporary", "aten.mm", unit),
            Touch("gradient", gradient, 4 * NUMEL, "temporary", f"{unit}.w"),
            Touch("free", saved, SAVED, "activation"),
        )
        backward[1:1] = [Piece("enter_backward", unit, made), Piece("leave_backward", unit, ())]
    forward.append(Piece("finish", "", ()))
    return Recording((*forward, *backward), (block(0), block(1)), buffers=11, inputs=22)


ADAMW = optimizer_named("adamw", "foreach")


@pytest.fixture
def run() -> Step:
    """The ledger after a step."""

    def step(
        passes: Sequence[Pass] = ONE_PASS.passes,
        chunks: int = 1,
        sent: int = 0,
        optimizer: Optimizer = ADAMW,
        **changes: Any,
    ) -> Ledger:
        heap, sharding = Ledger(), Sharding(**changes)
        made = [Chunk(recording(), sent) for _ in range(chunks)]
        made_step = RankStep(made, (PassRun(tuple(passes)),), optimizer)
        several = sharding.shards > 1
        made_step.run(heap, lambda h, u, f: (FSDP2 if several else Replicated)(h, u, sharding, f))
        return heap

    return step


def total(heap: Ledger, phase: str) -> int:
    return sum(heap.peaks[phase].values())  # type: ignore[index]


STEADY = 3 * WEIGHTS + 11 + 22


def test_a_plain_step_has_its_peaks_where_arithmetic_has_them(run: Step) -> None:
    heap = run()
    assert total(heap, "forward") == STEADY + 2 * SAVED + PASSING
    assert total(heap, "backward") == STEADY + SAVED + WEIGHTS
    assert total(heap, "step") == STEADY + 2 * WEIGHTS  # gradients, and a list of square roots
    assert heap.total == STEADY


def test_counts_of_steps_are_on_the_device_where_it_is_the_host(run: Step) -> None:
    on_gpu, on_cpu = run(on_gpu=True), run(on_gpu=False)
    assert on_cpu.total == on_gpu.total + 2 * 4


def test_maps_of_codes_that_all_parameters_share_are_there_once(run: Step) -> None:
    heap = run(optimizer=optimizer_named("adamw_8bit_bitsandbytes"))
    of_small_tensors = 2 * 2 * 4 * NUMEL  # two moments of either block in fp32
    assert heap.live["optimizer_state"] == of_small_tensors + 2 * 256 * 4


def test_microbatches_in_flight_keep_their_activations(run: Step) -> None:
    passes = order("gpipe", 2, 3)[0]
    assert total(run(passes), "forward") == STEADY + 3 * 2 * SAVED + PASSING


def test_gradients_of_one_microbatch_are_there_while_the_next_runs(run: Step) -> None:
    passes = tuple(expanded([PassRun(ONE_PASS.passes, 2)]))
    heap = run(passes)
    assert total(heap, "forward") == STEADY + WEIGHTS + 2 * SAVED + PASSING
    assert total(heap, "backward") == STEADY + WEIGHTS + 2 * SAVED + 4 * NUMEL
    assert heap.total == STEADY


def test_the_gradient_that_was_sent_is_there_until_the_next_backward_ends(run: Step) -> None:
    passes = tuple(expanded([PassRun(ONE_PASS.passes, 2)]))
    alone, behind = run(passes), run(passes, sent=STREAM)
    for phase in ("forward", "backward"):
        assert total(behind, phase) == total(alone, phase) + STREAM
    assert total(behind, "step") == total(alone, "step")
    assert behind.total == alone.total


def test_a_split_backward_ends_with_the_weights(run: Step) -> None:
    split = (
        Pass("forward", 0, 0),
        Pass("input_backward", 0, 0),
        Pass("forward", 0, 1),
        Pass("weight_backward", 0, 0),
        Pass("input_backward", 0, 1),
        Pass("weight_backward", 0, 1),
    )
    assert total(run(split), "forward") == STEADY + 2 * 2 * SAVED + PASSING
    assert run(split).total == STEADY


@pytest.mark.parametrize("reduces", ["each", "last", "end"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_schedule_ends_as_it_began(run: Step, reduces: str, schedule: str) -> None:
    changes: dict[str, Any] = {
        "shards": 4,
        "reduces": reduces,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
    }
    wanted = run(**changes).total
    for rank in (0, 1):
        assert run(order(schedule, 2, 4)[rank], **changes).total == wanted


def test_more_shards_never_take_more(run: Step) -> None:
    peaks = [max(total(heap, phase) for phase in heap.peaks) for heap in map(_on(run), (2, 4, 8))]
    assert peaks == sorted(peaks, reverse=True)


def _on(run: Step) -> Callable[[int], Ledger]:
    return lambda shards: run(shards=shards, param_dtype="bf16", reduce_dtype="fp32")


MACHINES: tuple[Callable[..., Machine], ...] = (FSDP2, FlatUnits, Replicated, Megatron)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[tuple[PassRun, ...], int]:
    """What a rank of a pipeline does, and how many chunks it has."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = draw(st.integers(2, 3)) if SCHEDULES[name].chunks == "several" else chunk_count(name)
    stages, microbatches = draw(st.integers(1, 7)), draw(st.integers(1, 40))
    try:
        ranks = order_in_runs(name, stages, microbatches, chunks)
    except InputError:  # the schedule does not take these numbers
        return (PassRun(ONE_PASS.passes, microbatches),), 1
    return ranks[draw(st.integers(0, stages - 1))], chunks


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    return Sharding(
        shards=draw(st.integers(1, 3)),
        replicas=draw(st.integers(1, 2)),
        param_dtype=draw(st.sampled_from(["", "bf16"])),
        reduce_dtype=draw(st.sampled_from(["", "fp32"])),
        reshard_after_forward=draw(st.booleans()),
        kept=draw(st.sampled_from([frozenset(), frozenset(("",)), frozenset(("1",))])),
        prefetch=draw(st.sampled_from([0, 1])),
        flat=draw(st.booleans()),
        reduces=draw(st.sampled_from(["each", "last", "end"])),
        on_gpu=draw(st.booleans()),
    )


@given(pipelines(), shardings(), st.sampled_from(MACHINES), st.sampled_from([0, STREAM]))
@settings(max_examples=150, deadline=None)
def test_what_repeats_is_skipped_without_a_byte_of_difference(
    pipeline: tuple[tuple[PassRun, ...], int],
    sharding: Sharding,
    machine: Callable[..., Machine],
    sent: int,
) -> None:
    runs, chunks = pipeline
    one_by_one = tuple(PassRun((each,)) for each in expanded(runs))
    found = []
    for given_runs in (runs, one_by_one):
        heap = Ledger(fine=True)
        step = RankStep([Chunk(recording(), sent) for _ in range(chunks)], given_runs)
        step.run(heap, lambda h, u, f: machine(h, u, sharding, f))
        found.append((heap.peaks, heap.where, heap.live, heap.total))
    assert found[0] == found[1]


def test_a_repetition_is_skipped_only_while_some_of_what_it_counts_down_is_left() -> None:
    """Each backward meets one of six forwards; the last of them is met as it comes."""
    heap, order_of = Ledger(), ("0",)
    machine = FSDP2(heap, {"0": block(0).tensors}, Sharding(reduces="end"))

    def backward() -> None:
        machine.begin(order_of, order_of, False)
        machine.enter_backward("0")
        machine.leave_backward("0")
        machine.finish_backward()

    for _ in range(6):
        machine.begin(order_of, order_of, False)
        machine.enter("0")
        machine.leave("0")
        machine.finish()
    backward()
    before = Repetition(heap, machine)
    backward()
    assert before.skip(100) == 3
    assert [each.number for each in machine.depths()] == [1]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_thousand_microbatches_are_walked_like_a_few(machine: Callable[..., Machine]) -> None:
    walked = []

    class Counting(Ledger):
        def run(self, *arguments: Any) -> None:
            walked.append(self.phase)
            super().run(*arguments)

    counts = []
    for microbatches in (20, 1000):
        walked.clear()
        runs = order_in_runs("1f1b", 8, microbatches)[2]
        sharding = Sharding(shards=2, reduces="end", reshard_after_forward=False)
        step = RankStep([Chunk(recording())], runs)
        step.run(Counting(), lambda h, u, f: machine(h, u, sharding, f))  # noqa: B023
        counts.append(len(walked))
    assert counts[0] == counts[1]
