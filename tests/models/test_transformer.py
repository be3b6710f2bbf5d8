from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from shardwright.core.job import Job, parse_job
from shardwright.core.specs.transformer import spec
from shardwright.memory.ledger import Ledger
from shardwright.models.transformer import Transformer, next_token_loss
from shardwright.trace.recorder import Recorder
from shardwright.tracker.memory import MemoryTracker

MATMULS = ("qkv", "attention", "proj", "up", "down", "vocab")
SIZES: dict[str, dict[str, int]] = {
    "plain": {"size": 2, "sequence": 16, "layers": 2, "dim": 32, "heads": 4, "vocab": 256},
    "odd": {"size": 3, "sequence": 33, "layers": 3, "dim": 21, "heads": 7, "vocab": 13},
    "ones": {"size": 1, "sequence": 1, "layers": 1, "dim": 1, "heads": 1, "vocab": 1},
    "one token": {"size": 5, "sequence": 1, "layers": 2, "dim": 24, "heads": 1, "vocab": 11},
    "one sample": {"size": 1, "sequence": 65, "layers": 1, "dim": 24, "heads": 24, "vocab": 300},
    "narrow": {"size": 4, "sequence": 9, "layers": 2, "dim": 16, "heads": 2, "ffn_dim": 3},
    "long": {"size": 1, "sequence": 700, "layers": 1, "dim": 8, "heads": 2, "vocab": 5},
    "weights": {"size": 1, "sequence": 2, "layers": 1, "dim": 128, "heads": 2, "vocab": 50},
}


def _job(size: int = 2, sequence: int = 5, seed: int = 0, **model: Any) -> Job:
    widths = {"kind": "transformer", "layers": 2, "dim": 12, "heads": 3, "vocab": 7}
    return parse_job(
        {
            "model": widths | model,
            "batch": {"size": size, "sequence": sequence},
            "train": {"seed": seed},
        }
    )


def _batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (job.batch.size, job.batch.sequence)
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randint(job.model.vocab, shape, generator=generator) for _ in "it")
    return inputs, targets


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(_job())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_spec_has_the_parameters_of_the_module_in_its_order(sizes: dict[str, int]) -> None:
    job = _job(**sizes)
    built = [(n, tuple(p.shape), p.dtype) for n, p in Transformer(job, "meta").named_parameters()]
    told = spec(job)
    assert [(t.fqn, t.shape, torch.float32) for t in told.tensors] == built
    for unit in told.units:
        mine = [name for name, _, _ in built if name.startswith(f"{unit.name}.")]
        assert [t.fqn for t in unit.tensors] == mine


def test_units_are_modules_and_nothing_is_a_buffer(model: Transformer) -> None:
    for unit in spec(_job()).units:
        assert list(model.get_submodule(unit.name).parameters())
    assert not list(model.buffers())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_spec_counts_the_flops_of_matrix_products(sizes: dict[str, int]) -> None:
    job = _job(**sizes)
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
    assert forward.get_total_flops() == _told_flops(job, "forward")
    assert backward.get_total_flops() == _told_flops(job, "backward")


def _shaped(formula: Any) -> Any:
    """torch's own count for attention, which it knows only by the names of other kernels."""

    def count(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        tensors = [shape for shape in shapes if isinstance(shape, torch.Size)]
        return int(formula(*tensors[: 3 if formula is sdpa_flop else 4]))

    return count


def _told_flops(job: Job, direction: str) -> int:
    works = [work for stage in spec(job).stages for work in getattr(stage, direction)]
    told = [w.flops_per_sample for w in works if w.name.rpartition(".")[2] in MATMULS]
    return sum(told) * job.batch.size


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_spec_has_the_bytes_of_every_operation(sizes: dict[str, int]) -> None:
    job = _job(**sizes)
    told, measured = _told_bytes(job), _measured_bytes(job)
    assert _maxima(told) == _maxima(measured)
    assert sum(told) == sum(measured)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_peaks_of_forward_and_backward_are_those_of_the_module(sizes: dict[str, int]) -> None:
    job = _job(**sizes)
    told, heap = spec(job), Ledger()
    with heap.during("forward"):
        for item in (*told.inputs, *(w for s in told.stages for w in s.forward)):
            _run(heap, job, item)
    with heap.during("backward"):
        for work in (w for s in reversed(told.stages) for w in s.backward):
            _run(heap, job, work)
    tracker = MemoryTracker()
    inputs, targets, built = _known(job, tracker)
    kept = tracker.total - inputs.nbytes - targets.nbytes
    with tracker:
        with tracker.during("forward"):
            loss = next_token_loss(built(inputs), targets)
        with tracker.during("backward"):
            loss.backward()
    tracker.close()
    for phase in ("forward", "backward"):
        measured = sum(tracker.peaks[phase].values()) - kept
        assert sum(heap.peaks[phase].values()) == pytest.approx(measured, rel=0.01)


def _run(heap: Ledger, job: Job, work: Any) -> None:
    for item in getattr(work, "takes", (work,)):
        heap.take(item.name, item.kind, item.nbytes(job.batch.size))
    for name in getattr(work, "frees", ()):
        heap.free(name)


def _known(job: Job, tracker: MemoryTracker) -> tuple[torch.Tensor, torch.Tensor, Transformer]:
    """A batch and a model that has no gradients yet, as a unit before its backward."""
    inputs, targets = _batch(job)
    built = Transformer(job)
    for parameter in built.parameters():
        tracker.adopt(parameter.detach(), "weight")
    for tensor in (inputs, targets):
        tracker.adopt(tensor, "input")
    return inputs, targets, built


def _measured_bytes(job: Job) -> list[int]:
    """Every change of live bytes, in order."""
    recorder, tracker = Recorder(), MemoryTracker()
    inputs, targets, built = _known(job, tracker)
    tracker.close()
    for tensor in (inputs, targets, *(p.detach() for p in built.parameters())):
        recorder.adopt(tensor)
    with recorder:
        loss = next_token_loss(built(inputs), targets)
        loss.backward()
        records = list(recorder.records)
    recorder.close()
    return [r.nbytes if r.what == "take" else -r.nbytes for r in records]


def _told_bytes(job: Job) -> list[int]:
    stages, held, changes = spec(job).stages, dict[str, int](), list[int]()
    forward = [work for stage in stages for work in stage.forward]
    backward = [work for stage in reversed(stages) for work in stage.backward]
    for work in forward + backward:
        for item in work.takes:
            held[item.name] = item.nbytes(job.batch.size)
            changes.append(held[item.name])
        changes.extend(-held.pop(name) for name in work.frees)
    return changes


def _maxima(changes: list[int]) -> list[int]:
    """Live bytes wherever they stop to grow: every peak of every operation."""
    live, grows, found = 0, False, []
    for change in changes:
        if change < 0 and grows:
            found.append(live)
        grows = change > 0
        live += change
    return found + [live] * grows


def test_a_batch_gives_logits_for_every_token(model: Transformer) -> None:
    inputs, _ = _batch(_job())
    assert model(inputs).shape == (2, 5, 7)


def test_no_token_sees_what_comes_after_it(model: Transformer) -> None:
    inputs, _ = _batch(_job())
    changed = inputs.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 7
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one(model: Transformer) -> None:
    inputs, _ = _batch(_job())
    torch.testing.assert_close(model(inputs[:, :2]), model(inputs)[:, :2])


def test_attention_is_a_softmax_over_what_came_before(model: Transformer) -> None:
    block, qkv = model.layers[0], torch.randn(2, 5, 36)
    query, key, value = qkv.view(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) / math.sqrt(4)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    wanted = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 12)
    torch.testing.assert_close(block._attend(qkv), wanted)


def test_the_loss_is_the_mean_over_all_tokens(model: Transformer) -> None:
    inputs, targets = _batch(_job())
    logits = model(inputs)
    chosen = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    torch.testing.assert_close(next_token_loss(logits, targets), -chosen.mean())


def test_an_untrained_model_guesses(model: Transformer) -> None:
    inputs, targets = _batch(_job())
    assert next_token_loss(model(inputs), targets).item() == pytest.approx(math.log(7), rel=0.05)


@pytest.mark.parametrize(
    ("name", "offsets", "sizes"),
    [
        ("embed.token.weight", (2, 5), (3, 4)),
        ("layers.1.qkv.weight", (35, 0), (1, 12)),
        ("layers.0.up.bias", (3,), (5,)),
        ("head.norm.weight", (0,), (0,)),
    ],
)
def test_a_rectangle_starts_as_in_the_whole(
    model: Transformer, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    whole = model.get_parameter(name).detach()
    spans = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    assert torch.equal(model.initial_block(name, offsets, sizes), whole[spans])


def test_starting_values_follow_the_seed_and_nothing_else(model: Transformer) -> None:
    torch.manual_seed(1)
    again, other = Transformer(_job()), Transformer(_job(seed=1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        same = torch.equal(parameter, other.get_parameter(name))
        assert same == (parameter.dim() == 1)


def test_a_model_on_the_meta_device_can_tell_its_starting_values(model: Transformer) -> None:
    planned = Transformer(_job(), "meta")
    assert all(p.is_meta for p in planned.parameters())
    whole = planned.initial_block("layers.1.proj.weight", (0, 0), (12, 12))
    assert torch.equal(whole, model.get_parameter("layers.1.proj.weight"))


def test_what_is_added_to_the_stream_starts_smaller_in_deeper_models() -> None:
    model = Transformer(_job(layers=8, dim=48))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            norm = "norm" in name and name.endswith("weight")
            assert torch.equal(parameter, torch.full_like(parameter, 1.0 if norm else 0.0))
            continue
        residual = name.endswith(("proj.weight", "down.weight"))
        wanted = 0.02 / math.sqrt(16) if residual else 0.02
        assert parameter.std().item() == pytest.approx(wanted, rel=0.2), name
