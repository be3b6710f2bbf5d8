"""What a step asks of every unit is asked in a quick way, with the answer of the slow one."""

import weakref

import pytest
import torch
from torch import nn

from shardwright.core.errors import InputError
from shardwright.core.layout import unit_layout
from shardwright.core.placement import Flat
from shardwright.core.tensor import TensorSpec
from shardwright.runtime.probe import Probe
from shardwright.runtime.torch_private import of_bits
from shardwright.runtime.units.linked import OfStrays
from shardwright.runtime.units.parameter import Structure
from shardwright.runtime.units.regroup import Apart
from shardwright.tracker.private import any_accumulated_hooks


def test_a_child_with_the_number_of_one_that_is_gone_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.requires_grad_(False)
    structure = Structure()
    structure.add(model, "", lambda _: False)
    structure.check("model")
    (row, *_) = structure._rows
    gone = weakref.ref(model[0])
    del model[0]
    assert gone() is None
    model.append(nn.Linear(1, 1))
    assert row.ids is None, "another module may be where the first one was"
    with pytest.raises(InputError, match="which nothing would shard or reduce"):
        structure.check("model")


def test_only_others_hooks_than_ours_are_a_reason_to_call_them_one_by_one() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    assert not any_accumulated_hooks(parameters, OfStrays)
    parameters[0].register_post_accumulate_grad_hook(OfStrays(print))
    assert not any_accumulated_hooks(parameters, OfStrays)
    handle = parameters[0].register_post_accumulate_grad_hook(print)
    assert any_accumulated_hooks(parameters, OfStrays)
    handle.remove()
    assert not any_accumulated_hooks(parameters, OfStrays)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ],
)
def test_bits_are_the_numbers_that_torch_would_make_of_them(dtype: torch.dtype) -> None:
    bits = [1, 0, True, False, 1]
    found = of_bits(bits, 8, torch.zeros(0, dtype=dtype))
    assert torch.equal(found, torch.tensor([*map(int, bits), 0, 0, 0], dtype=dtype))


def test_a_probe_that_overrides_anything_listens() -> None:
    class Deaf(Probe):
        pass

    assert not Probe().listens
    assert Deaf().listens


@pytest.mark.parametrize("missing", [None, 1])
def test_gradients_are_in_rank_order_however_they_lie_in_memory(missing: int | None) -> None:
    specs = [TensorSpec("a", (5, 7)), TensorSpec("b", (3,)), TensorSpec("c", (9, 4))]
    (segment,) = unit_layout(specs, Flat(), 4).segments
    rows = torch.full((4, segment.share + 3), -1.0)
    apart = Apart(segment, rows)
    shapes = [slot.tensor.shape for slot in segment.slots]
    values = [torch.randn(2, *shape)[1] for shape in shapes]  # none begins its storage
    values[0] = torch.randn(shapes[0][::-1]).t() if len(shapes[0]) > 1 else values[0]
    given = [None if place == missing else value for place, value in enumerate(values)]
    apart(given, torch.ones(4, 3))
    flat = rows[:, : segment.share].reshape(-1)
    for slot, value in zip(segment.slots, given, strict=True):
        found = flat[slot.start : slot.start + slot.tensor.numel].view(slot.tensor.shape)
        assert torch.equal(found, torch.zeros_like(found) if value is None else value)
    assert torch.equal(rows[:, segment.share :], torch.ones(4, 3))
