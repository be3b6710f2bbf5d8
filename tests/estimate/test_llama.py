"""Recordings of a llama's stages stand for all of their layers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.errors import InputError
from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.megatron import MegatronSettings
from shardwright.core.recording import Recording
from shardwright.estimate import llama
from shardwright.estimate.footprint import footprint
from shardwright.estimate.llama import StageRequest, forget_recordings, stage_recording
from shardwright.estimate.stages import ModelStage
from shardwright.heap.rank_step import Chunk
from shardwright.job.job import parse_job, read_job
from shardwright.report.wording import headline
from shardwright.trace.treatment import Treatment

SHAPE = LlamaShape(layers=8, dim=32, heads=4, kv_heads=2, head_dim=8, ffn_dim=80, vocab=200)
BATCH, SEQUENCE = 2, 12
WHOLE = ModelStage((0, 8), True, True)
ITEM = 2  # bytes of bf16


def recorded(
    stage: ModelStage = WHOLE,
    shape: LlamaShape = SHAPE,
    local: LocalShape | None = None,
    checkpointing: str = "none",
    **changes: Any,
) -> Recording:
    local = local or LocalShape()
    local = msgspec.structs.replace(local, first=stage.first, last=stage.last)
    treatment = changes.pop("treatment", None) or Treatment("cpu", checkpointing)
    request = StageRequest(shape, local, BATCH, SEQUENCE, "bf16", treatment, **changes)
    return stage_recording(request, stage)


LOCALS = (LocalShape(), LocalShape(tensor=2, expert=2), LocalShape(context=2))


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "core_attention"])
def test_tensors_of_no_device_leave_what_fake_ones_do(
    checkpointing: str, local: LocalShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = msgspec.structs.replace(
        SHAPE, experts=4, experts_per_token=2, expert_ffn_dim=40, moe_layers=(1, 3, 5, 7)
    )
    treatment = Treatment("cuda", checkpointing)
    found = recorded(shape=shape, local=local, treatment=treatment)
    monkeypatch.setattr(llama, "_without_data", lambda _: FakeTensorMode())
    forget_recordings()
    assert recorded(shape=shape, local=local, treatment=treatment) == found
    forget_recordings()


def bytes_of(recording: Recording, *, named: str = "") -> tuple[int, int]:
    """Live bytes at the most and in the end, gradients of parameters apart."""
    chunk = Chunk(recording)
    total = most = 0
    for moment in (*chunk.forward, *chunk.backward):
        summary = chunk.summaries["added"].of(moment.piece)
        most = max(most, total + summary.peak_total)
        total += summary.net_total
    return most, total


def test_few_layers_are_run_for_many() -> None:
    found = recorded()
    assert [unit.name for unit in found.units] == [
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]
    names = [name for name, _ in Chunk(found).blocks.unfolded()]
    assert names == ["tok_embeddings", *(f"layers.{k}" for k in range(8)), "head"]


def test_blocks_for_further_tokens_are_the_last_stages_alone() -> None:
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24, "moe_layers": (7,)}
    shape = msgspec.structs.replace(SHAPE, mtp_layers=2, **experts)
    local = LocalShape(megatron=MegatronSettings())
    begin, end = ModelStage((0, 4), True, False), ModelStage((4, 8), False, True)
    assert len(recorded(begin, shape, local).units) == 1 + 3
    found = recorded(end, shape, local)
    names = [name for name, _ in Chunk(found).blocks.unfolded()]
    assert names == [
        "tok_embeddings",
        *(f"layers.{k}" for k in range(4, 8)),
        "mtp.0",
        "mtp.1",
        "head",
    ]
    tensors = {t.fqn: t.shape for unit in found.units for t in unit.tensors}
    wanted = {name: size for name, size in shape.tensors if name.startswith("mtp.")}
    assert {name: tensors[name] for name in wanted} == wanted
    assert "mtp.1.moe.experts.w1" in wanted
    # Of each block its input stays, and what follows embedded; logits of all three losses do.
    most = bytes_of(recorded(end, shape, local, "full"))[0]
    alone = bytes_of(recorded(end, msgspec.structs.replace(shape, mtp_layers=0), local, "full"))[0]
    losses = 2 * BATCH * SEQUENCE * SHAPE.vocab * 4
    assert losses < most - alone < losses + 12 * BATCH * SEQUENCE * SHAPE.dim * ITEM


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("checkpointing", ["none", "layers:2", "first:3"])
def test_unfolded_layers_take_what_each_of_them_takes(
    checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = bytes_of(recorded(checkpointing=checkpointing))
    monkeypatch.setattr("shardwright.trace.structure.LONGEST_PERIOD", 0)
    forget_recordings()
    whole = recorded(checkpointing=checkpointing)
    assert len(whole.units) == 2 + SHAPE.layers
    assert bytes_of(whole) == folded


@pytest.mark.slow
def test_layers_with_experts_are_not_like_the_others() -> None:
    shape = msgspec.structs.replace(
        SHAPE, experts=4, experts_per_token=2, expert_ffn_dim=40, moe_layers=(1, 3, 5, 7)
    )
    found = recorded(shape=shape)
    assert [series.period for series in found.series] == [2]
    units = dict(Chunk(found).blocks.unfolded())
    assert [any("moe" in t.fqn for t in units[f"layers.{k}"].tensors) for k in range(4)] == [
        False,
        True,
        False,
        True,
    ]


def test_experts_that_other_ranks_do_not_have_are_a_unit() -> None:
    shape = msgspec.structs.replace(
        SHAPE, experts=4, experts_per_token=2, expert_ffn_dim=40, moe_layers=tuple(range(8))
    )
    found = recorded(shape=shape, local=LocalShape(expert=2))
    units = {unit.name: unit for unit in found.units}
    assert {t.shape[0] for t in units["layers.0.moe.experts"].tensors} == {2}
    assert not any("experts" in t.fqn for t in units["layers.0"].tensors)


def test_a_tied_head_shares_the_roots_unit() -> None:
    found = recorded(shape=msgspec.structs.replace(SHAPE, tied_embeddings=True))
    (root,) = [unit for unit in found.units if unit.name == ""]
    assert [t.fqn for t in root.tensors] == ["tok_embeddings.weight", "norm.weight"]


def test_a_stage_in_between_takes_and_sends_the_stream() -> None:
    found = recorded(ModelStage((2, 4), False, False))
    stream = BATCH * SEQUENCE * SHAPE.dim * ITEM
    assert found.inputs == found.result == stream
    assert [name for name, _ in Chunk(found).blocks.unfolded()] == ["layers.2", "layers.3"]


def test_nothing_but_gradients_is_left_of_a_microbatch() -> None:
    for stage in (WHOLE, ModelStage((0, 4), True, False), ModelStage((4, 8), False, True)):
        assert bytes_of(recorded(stage))[1] == 0


def test_the_last_stage_keeps_its_logits_until_its_backward_is_over() -> None:
    logits = BATCH * SEQUENCE * SHAPE.vocab * ITEM

    def kept(recording: Recording) -> bool:
        """Whether what is as large as the logits outlives the loss."""
        made = [
            touch.slot
            for piece in recording.pieces
            for touch in piece.touches
            if touch.what == "take" and touch.nbytes == logits
        ]
        last = recording.pieces[-1]
        return any(touch.what == "free" and touch.slot == made[0] for touch in last.touches)

    assert kept(recorded(ModelStage((4, 8), False, True)))
    assert not kept(recorded(WHOLE))


def test_without_mixed_precision_inputs_are_not_cast() -> None:
    cast, plain = (bytes_of(recorded(casts=casts))[0] for casts in (True, False))
    assert cast > plain


@pytest.mark.parametrize("runtime", ["fsdp2", "shardwright"])
def test_what_is_frozen_has_the_dtype_of_compute_and_neither_gradient_nor_state(
    runtime: str,
) -> None:
    sizes = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 80, "vocab": 200}
    job = parse_job(
        {
            "model": {"kind": "llama", **sizes, "lora": 4},
            "cluster": {"compute_device": "cuda", "world_size": 1},
            "batch": {"size": 2, "sequence": 16},
            "memory": {"runtime": runtime, "checkpointing": "none"},
        }
    )
    found = footprint(job)
    trained = 3 * 4 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 80) * 3)  # each layer's in and out
    assert found.parameters - int(found.frozen or 0) == trained
    assert f" {trained:,} of them trained, on 1 rank" in headline(found)
    held = found.worst.by_category
    assert held["weight"] == 2 * int(found.frozen or 0) + 4 * trained
    assert 2 * 4 * trained <= held["optimizer_state"] <= 2 * 4 * trained + 4 * 3 * 14
    assert held.get("gradient", 0) <= 4 * trained


def test_attention_with_sinks_has_no_other_kernel() -> None:
    job = read_job("gpt-oss-20b", ["memory.attention=eager"], "8xH100")
    with pytest.raises(InputError, match="expected 'flash' for a model with sinks"):
        footprint(job)
