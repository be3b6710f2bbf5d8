"""A T5 by its Hugging Face configuration: as many parameters as published, masked, and in memory
what was estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.core.t5 import T5Shape
from shardwright.estimate.footprint import footprint
from shardwright.job.hf_config import hf_shape
from shardwright.job.job import Job, parse_job
from shardwright.models.t5 import T5, bucket, build
from shardwright.trace.checkpointing import apply_checkpointing, policy
from shardwright.tracker.memory import MemoryTracker

BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Totals of the published weights.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "t5-small": ({}, 60_506_624),
    "t5-base": (BASE, 222_903_552),
    "t5-3b": (
        {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
        2_851_598_336,
    ),
    "flan-t5-base": ({**BASE, **FLAN, "d_ff": 2048}, 247_577_856),
    "mt5-small": ({"model_type": "mt5"}, 300_176_768),
}
TINY = {"vocab_size": 96, "d_model": 16, "d_kv": 4, "d_ff": 48, "num_layers": 5, "num_heads": 4}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    document, published = PUBLISHED[name]
    shape = hf_shape({"model_type": "t5", **document})
    assert isinstance(shape, T5Shape)
    with torch.device("meta"):
        model = T5(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_a_kind_with_its_sizes_is_the_call_that_a_configuration_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "d_model": 16, "num_layers": 2}))
    sizes = {"dim": 16, "layers": 2, "decoder_layers": 2}
    called = parse_job({"model": {"kind": "t5", **sizes}})
    assert called.model == parse_job({"model": {"hf_config": str(path)}}).model
    assert called.model.name == "t5"


def job_of(tmp_path: Path, **memory: Any) -> Job:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", **TINY}))
    return parse_job(
        {
            "model": {"hf_config": str(path)},
            "cluster": {"world_size": 1},
            "batch": {"size": 3, "sequence": 8},
            "memory": {
                "runtime": "ddp",
                "lowering": "cpu",
                "param_dtype": "fp32",
                "implementation": "foreach",
                **memory,
            },
        }
    )


def test_a_configuration_becomes_a_module_with_its_sizes(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.model.name == "t5"
    assert job.model.python == "shardwright.models.t5:build"
    module, inputs, loss, targets = build(3, 8, **job.model.arguments)
    assert module.head.weight is module.shared.weight
    assert loss(module(*inputs), targets).dim() == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_real_step_takes_what_was_estimated(tmp_path: Path, checkpointing: str) -> None:
    job = job_of(tmp_path, checkpointing=checkpointing)
    found = footprint(job).worst
    module, inputs, loss, targets = build(3, 8, **job.model.arguments)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)

    def step() -> None:
        loss(module(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    blocks = [*module.encoder.layers, *module.decoder.layers]
    chosen = policy(checkpointing).of_a_block
    with apply_checkpointing(blocks if checkpointing == "full" else [], chosen):
        step()
        with MemoryTracker(module, optimizer, inputs=(inputs, targets)) as seen:
            step()
    measured = {phase: sum(kinds.values()) for phase, kinds in seen.peaks.items()}
    for phase in found.phases:
        if phase.phase in ("forward", "backward", "step"):
            assert phase.bytes == measured[phase.phase], phase.phase


def test_a_decoder_sees_nothing_that_comes_later() -> None:
    model = T5(T5Shape(vocab=32, dim=16, head_dim=4, ffn_dim=32, heads=4, dropout=0.0))
    ids = torch.arange(12).view(2, 6)
    changed = ids.clone()
    changed[:, 4:] = 31
    before, after = model(ids, ids), model(ids, changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_distances_have_buckets_that_widen() -> None:
    away = torch.tensor([0, 1, 7, 8, 15, 16, 40, 127, 1000])
    assert bucket(-away, 32, 128, both=False).tolist() == [0, 1, 7, 8, 15, 16, 23, 31, 31]
    both = bucket(torch.cat((-away, away)), 32, 128, both=True).tolist()
    assert both[: len(away)] == [0, 1, 7, 8, 9, 10, 12, 15, 15]
    assert both[len(away) + 1 :] == [16 + k for k in both[1 : len(away)]]
