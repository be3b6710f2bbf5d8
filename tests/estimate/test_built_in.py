"""Recordings of the models that come with the package are what these models do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from shardwright.core.recording import Moment, Recording, Unfolded
from shardwright.estimate.recorded import built_in_recording, settle
from shardwright.job.job import Job, parse_job
from shardwright.job.model_of_job import model_of, tables_of
from shardwright.models.dlrm import DLRM
from shardwright.models.transformer import Transformer, next_token_loss
from shardwright.trace.module import TracedModule, record
from shardwright.trace.recorder import Recorder
from shardwright.trace.tables import RoutedRows
from shardwright.trace.treatment import Treatment
from shardwright.tracker.memory import MemoryTracker

ON_CPU = Treatment("cpu")
BATCH, DENSE, IDS, FLOAT = 6, 13, 8, 4
SIZES: dict[str, dict[str, int]] = {
    "plain": {"size": 2, "sequence": 16, "layers": 2, "dim": 32, "heads": 4, "vocab": 256},
    "odd": {"size": 3, "sequence": 33, "layers": 3, "dim": 21, "heads": 7, "vocab": 13},
    "ones": {"size": 1, "sequence": 1, "layers": 1, "dim": 1, "heads": 1, "vocab": 1},
    "one token": {"size": 5, "sequence": 1, "layers": 2, "dim": 24, "heads": 1, "vocab": 11},
    "one sample": {"size": 1, "sequence": 65, "layers": 1, "dim": 24, "heads": 24, "vocab": 300},
    "narrow": {"size": 4, "sequence": 9, "layers": 2, "dim": 16, "heads": 2, "ffn_dim": 3},
    "long": {"size": 1, "sequence": 700, "layers": 1, "dim": 8, "heads": 2, "vocab": 5},
    "weights": {"size": 1, "sequence": 2, "layers": 1, "dim": 128, "heads": 2, "vocab": 50},
    "deep": {"size": 2, "sequence": 5, "layers": 12},
}
KINDS = ("dot", "cat", "dcn")
Sized = Callable[[dict[str, int]], Recording]


def dlrm_job(interaction: str = "dot") -> Job:
    return parse_job(
        {
            "tables": [{"name": f"t{i}", "rows": 10 + i, "dim": 16} for i in range(3)],
            "model": {"bottom": [8, 16], "top": [6, 1], "interaction": interaction},
            "batch": {"size": BATCH},
        }
    )


def transformer_job(size: int = 2, sequence: int = 5, **model: Any) -> Job:
    widths = {"kind": "transformer", "layers": 2, "dim": 12, "heads": 3, "vocab": 7}
    return parse_job({"model": widths | model, "batch": {"size": size, "sequence": sequence}})


@pytest.fixture(scope="module")
def dlrm() -> Callable[[str], Recording]:
    """The recording with a kind of interaction, made once."""
    made = {kind: built_in_recording(dlrm_job(kind), ON_CPU) for kind in KINDS}
    return made.__getitem__


@pytest.fixture(scope="module")
def transformer() -> Sized:
    """The recording of a transformer of these sizes, made once."""
    known: dict[str, Recording] = {}

    def make(sizes: dict[str, int]) -> Recording:
        if str(sizes) not in known:
            known[str(sizes)] = built_in_recording(transformer_job(**sizes), ON_CPU)
        return known[str(sizes)]

    return make


def _flops(moments: Iterable[Moment]) -> int:
    return sum(moment.piece.work.flops for moment in moments)


def _changes(moments: Iterable[Moment]) -> list[int]:
    """Every change of live bytes, in order."""
    touches = [touch for moment in moments for touch in moment.piece.touches]
    signs = {"take": 1, "free": -1, "gradient": 0}
    return [signs[t.what] * t.nbytes for t in touches if t.what != "gradient"]


def _measured(
    model: nn.Module, given: Iterable[torch.Tensor], step: Callable[[], Any]
) -> list[int]:
    """The same of a real step."""
    recorder = Recorder()
    held = (*model.parameters(), *model.buffers())
    for tensor in (*given, *(each.detach() for each in held)):
        recorder.adopt(tensor)
    with recorder:
        step().backward()
        records = list(recorder.touches)
    recorder.storages.release()
    return [r.nbytes if r.what == "take" else -r.nbytes for r in records if r.nbytes]


# ---- DLRM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interaction", KINDS)
def test_a_dlrm_has_the_parameters_of_its_module_tables_first(
    dlrm: Callable[[str], Recording], interaction: str
) -> None:
    job = dlrm_job(interaction)
    built = {n: tuple(p.shape) for n, p in DLRM(job, "meta").named_parameters()}
    found = model_of(job, dlrm(interaction))
    names = ["bottom", "interact", "top"] if interaction == "dcn" else ["bottom", "top"]
    assert [(u.name, u.series, u.modules) for u in found.units] == [(n, "", (n,)) for n in names]
    for unit in found.units:
        mine = [(n, shape) for n, shape in built.items() if n.startswith(f"{unit.name}.")]
        assert [(t.fqn, t.shape) for t in unit.tensors] == mine
    assert {t.fqn: t.shape for t in found.tensors} == built
    assert [t.tensor.fqn for t in tables_of(job)] == [n for n in built if n.startswith("tables.")]
    assert {t.dtype for t in found.tensors} == {"fp32"}


@pytest.mark.parametrize("interaction", KINDS)
def test_a_dlrm_has_the_buffers_of_its_module(
    dlrm: Callable[[str], Recording], interaction: str
) -> None:
    built = DLRM(dlrm_job(interaction), "meta")
    assert dlrm(interaction).buffers == sum(b.nbytes for b in built.buffers())


def test_a_sample_of_a_dlrm_brings_dense_features_ids_and_a_label(
    dlrm: Callable[[str], Recording],
) -> None:
    assert dlrm("dot").inputs == BATCH * (DENSE * FLOAT + 3 * IDS + FLOAT)


def test_rows_come_between_the_units_of_a_dlrm_and_go_back_between_them(
    dlrm: Callable[[str], Recording],
) -> None:
    assert [(p.point, p.unit) for p in dlrm("dot").pieces] == [
        ("begin", ""),
        ("enter", "bottom"),
        ("leave", "bottom"),
        ("lookup", "tables"),
        ("rows", "tables"),
        ("enter", "top"),
        ("leave", "top"),
        ("finish", ""),
        ("loss", ""),
        ("backward", ""),
        ("enter_backward", "top"),
        ("leave_backward", "top"),
        ("row_gradients", "tables"),
        ("enter_backward", "bottom"),
    ]


@pytest.mark.parametrize("interaction", KINDS)
def test_flops_of_a_dlrm_are_those_that_torch_counts(
    dlrm: Callable[[str], Recording], interaction: str
) -> None:
    built, step = DLRM(dlrm_job(interaction)), Unfolded(dlrm(interaction))
    with FlopCounterMode(display=False) as forward:
        logits = built(torch.randn(BATCH, DENSE), torch.zeros(BATCH, 3, dtype=torch.int64))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert _flops(step.forward) == forward.get_total_flops()
    assert _flops(step.backward) == backward.get_total_flops()


@pytest.mark.parametrize("interaction", KINDS)
def test_bytes_of_a_dlrm_come_and_go_as_in_a_real_step_its_tables_apart(
    dlrm: Callable[[str], Recording], interaction: str
) -> None:
    job, step = dlrm_job(interaction), Unfolded(dlrm(interaction))
    built = DLRM(job)
    built.tables = RoutedRows(job.tables[0].dim)
    dense, labels = torch.randn(BATCH, DENSE), torch.zeros(BATCH)
    ids = torch.zeros(BATCH, 3, dtype=torch.int64)

    def loss() -> torch.Tensor:
        logits = built(dense, ids).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    measured = _measured(built, (dense, ids, labels), loss)
    assert _changes([*step.forward, *step.backward]) == measured


# ---- transformer ---------------------------------------------------------------------------------


def _batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (job.batch.size, job.batch.sequence)
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randint(job.model.vocab, shape, generator=generator) for _ in "it")
    return inputs, targets


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_transformer_has_the_parameters_of_its_module_in_its_order(
    transformer: Sized, sizes: dict[str, int]
) -> None:
    job = transformer_job(**sizes)
    built = [(n, tuple(p.shape)) for n, p in Transformer(job, "meta").named_parameters()]
    found = model_of(job, transformer(sizes))
    assert [(t.fqn, t.shape) for t in found.tensors] == built
    assert {t.dtype for t in found.tensors} == {"fp32"}
    for unit in found.units:
        mine = [name for name, _ in built if name.startswith(f"{unit.name}.")]
        assert [t.fqn for t in unit.tensors] == mine


def test_units_of_a_transformer_are_its_modules_and_only_blocks_may_be_merged(
    transformer: Sized,
) -> None:
    found = model_of(transformer_job(), transformer(SIZES["deep"])).units
    blocks = [f"layers.{index}" for index in range(12)]
    assert [u.name for u in found] == ["embed", *blocks, "head"]
    assert [u.name for u in found if u.series] == blocks
    assert {u.series for u in found} == {"", "layers"}
    assert all(u.modules == u.members == (u.name,) for u in found)


def test_a_block_alone_is_a_unit_like_any_other(transformer: Sized) -> None:
    found = model_of(transformer_job(layers=1), transformer(SIZES["ones"])).units
    assert [(u.name, u.series) for u in found] == [
        ("embed", ""),
        ("layers.0", "layers"),
        ("head", ""),
    ]


def test_a_transformer_has_no_buffers_and_a_sample_brings_inputs_and_targets(
    transformer: Sized,
) -> None:
    found = transformer(SIZES["odd"])
    assert (found.buffers, found.inputs) == (0, 2 * 3 * 33 * IDS)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_flops_of_a_transformer_are_those_that_torch_counts(
    transformer: Sized, sizes: dict[str, int]
) -> None:
    job, step = transformer_job(**sizes), Unfolded(transformer(sizes))
    aten = torch.ops.aten
    attention: Any = {
        aten._scaled_dot_product_flash_attention_for_cpu: _shaped(sdpa_flop),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _shaped(sdpa_backward_flop),
    }
    inputs, targets = _batch(job)
    built = Transformer(job)
    with FlopCounterMode(display=False, custom_mapping=attention) as forward:
        loss = next_token_loss(built(inputs), targets)
    with FlopCounterMode(display=False, custom_mapping=attention) as backward:
        loss.backward()
    assert _flops(step.forward) == forward.get_total_flops()
    assert _flops(step.backward) == backward.get_total_flops()


def _shaped(formula: Any) -> Any:
    """torch's own count for attention, which it knows only by the names of other kernels."""

    def count(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        tensors = [shape for shape in shapes if isinstance(shape, torch.Size)]
        return int(formula(*tensors[: 3 if formula is sdpa_flop else 4]))

    return count


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bytes_of_a_transformer_come_and_go_as_in_a_real_step(
    transformer: Sized, sizes: dict[str, int]
) -> None:
    job, step = transformer_job(**sizes), Unfolded(transformer(sizes))
    (inputs, targets), built = _batch(job), Transformer(job)
    measured = _measured(built, (inputs, targets), lambda: next_token_loss(built(inputs), targets))
    assert _changes([*step.forward, *step.backward]) == measured


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_peaks_of_forward_and_backward_are_those_of_the_module(
    transformer: Sized, sizes: dict[str, int]
) -> None:
    job, step = transformer_job(**sizes), Unfolded(transformer(sizes))
    live, peaks = 0, {}
    for phase, moments in (("forward", step.forward), ("backward", step.backward)):
        levels = [live, *(live := live + change for change in _changes(moments))]
        peaks[phase] = max(levels)
    tracker = MemoryTracker()
    (inputs, targets), built = _batch(job), Transformer(job)
    for parameter in built.parameters():
        tracker.adopt(parameter.detach(), "weight")
    for tensor in (inputs, targets):
        tracker.adopt(tensor, "input")
    kept = tracker.total
    with tracker:
        with tracker.during("forward"):
            loss = next_token_loss(built(inputs), targets)
        with tracker.during("backward"):
            loss.backward()
    tracker.close()
    measured = {phase: sum(tracker.peaks[phase].values()) - kept for phase in peaks}  # type: ignore[index]
    assert peaks == pytest.approx(measured, rel=0.01)


def _whole(job: Job) -> Recording:
    """A transformer recorded at its full depth."""
    model = Transformer(job, device="meta")
    blocks = {f"layers.{index}": [block] for index, block in enumerate(model.layers)}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        settle(model, mode, torch.float32)
        tokens, targets = (
            torch.empty(job.batch.size, job.batch.sequence, dtype=torch.int64) for _ in range(2)
        )
        with ON_CPU.applied(model, [], []) as applied:
            return record(
                TracedModule(
                    model,
                    (tokens,),
                    {"embed": [model.embed], **blocks, "head": [model.head]},
                    lambda logits: next_token_loss(logits, targets),
                    extra=(targets,),
                    around=applied.around,
                )
            )


def test_few_blocks_of_a_deep_model_stand_for_all_of_them(transformer: Sized) -> None:
    few, whole = transformer(SIZES["deep"]), _whole(transformer_job(**SIZES["deep"]))
    assert len(few.pieces) < len(whole.pieces)
    assert (few.inputs, few.buffers) == (whole.inputs, whole.buffers)
    found, wanted = Unfolded(few), Unfolded(whole)
    for told, full in ((found.forward, wanted.forward), (found.backward, wanted.backward)):
        assert [_seen(moment) for moment in told] == [_seen(moment) for moment in full]
    assert [u.tensors for u in found.units.values()] == [u.tensors for u in wanted.units.values()]


def _seen(moment: Moment) -> Any:
    touches = [(t.what, t.nbytes, t.kind) for t in moment.piece.touches]
    return moment.piece.point, moment.unit, moment.piece.work, touches
