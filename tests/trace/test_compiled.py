"""What torch.compile keeps of a block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.trace.checkpointing import apply_checkpointing
from shardwright.trace.compiled import apply_compile
from shardwright.trace.lowering import lowering, unknown_operators
from shardwright.trace.recorder import Recorder
from shardwright.trace.treatment import Treatment

MIB = 2**20
HIDDEN, WIDE, KEYS = 64 * MIB, 224 * MIB, 16 * MIB  # of 8B at a sequence of 8192 in bf16
SUMS, RANDOM_STATE = 1 * MIB, 24

Step = Callable[..., tuple[int, int, set[str]]]
Measured = Callable[..., tuple[int, int, set[str]]]
TREATMENTS: dict[str, Callable[[str], Any]] = {
    "eager": lambda policy: partial(apply_checkpointing, policy_name=policy),
    "compiled": lambda policy: partial(apply_compile, checkpointing=policy),
}
KEPT: dict[tuple[str, str, int], tuple[int, int, set[str]]] = {}


@pytest.fixture
def measured(step: Step) -> Measured:
    """A step on a GPU of blocks that are eager or compiled under a policy, each made once."""

    def of(way: str, policy: str, count: int = 2) -> tuple[int, int, set[str]]:
        if (way, policy, count) not in KEPT:
            found = step(TREATMENTS[way](policy), partial(lowering, "cuda"), count)
            KEPT[way, policy, count] = found
        return KEPT[way, policy, count]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "selective", "full"])
def test_a_compiled_block_keeps_and_takes_no_more_than_an_eager_one(
    measured: Measured, name: str
) -> None:
    eager, compiled = measured("eager", name), measured("compiled", name)
    assert compiled[0] <= eager[0]
    assert compiled[1] < eager[1]


@pytest.mark.slow
def test_selective_does_not_keep_a_product_that_nothing_needs(measured: Measured) -> None:
    after, _, _ = measured("compiled", "selective")
    kept = HIDDEN + KEYS + WIDE + HIDDEN + SUMS + RANDOM_STATE  # not what the block adds at last
    assert after == 2 * kept + 2 * HIDDEN


@pytest.mark.slow
def test_the_blocks_of_8b_save_nearly_what_titan_measured(measured: Measured) -> None:
    """Batch 2 on 8 H100, selective: 82.4 to 77.0 GiB, of which some is the compiled loss's."""
    saving = []
    for count in (2, 3):
        _, eager, _ = measured("eager", "selective", count)
        _, compiled, _ = measured("compiled", "selective", count)
        saving.append(eager - compiled)
    layers = saving[1] + 29 * (saving[1] - saving[0])
    assert 4.5 <= 2 * layers / 2**30 <= 5.4


@pytest.mark.slow
def test_blocks_of_one_structure_are_traced_once_and_give_every_gradient(
    block: Any, stream: Any
) -> None:
    with FakeTensorMode(), lowering("cuda"):
        blocks = [block(small=True) for _ in range(3)]
        x, cosine, sine = stream(64, small=True)
        with apply_compile(blocks) as compiled:
            result = x
            for each in blocks:
                result = each(result, cosine, sine)
            assert len(blocks[0].forward.cache) == 1
            result.sum().backward()
        parameters = [p for each in blocks for p in each.parameters()]
        assert all(p.grad.shape == p.shape for p in (*parameters, x))
        assert not compiled.notes
        assert unknown_operators(compiled.operators) == ()
        assert not any("forward" in vars(each) for each in blocks)


def test_a_block_that_cannot_be_traced_runs_as_it_is_and_is_named() -> None:
    class Choice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if sizes.pop() else x

    sizes = [1]  # the trace leaves none
    with FakeTensorMode():
        choice, x = Choice(), torch.empty(4, requires_grad=True)
        with apply_compile([choice]) as compiled:
            sizes[:] = []
            with pytest.raises(IndexError):
                choice(x)
    (note,) = compiled.notes
    assert note.startswith("Choice could not be traced for torch.compile and is counted without it")


def test_a_block_that_a_policy_leaves_out_is_compiled_and_keeps_what_it_needs(saved: Any) -> None:
    """Both sides of the GELU, which a checkpointed one would not keep."""
    with FakeTensorMode():
        blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
        x = torch.empty(4, 8, requires_grad=True)
        treatment = Treatment("cpu", "layers:2", compile=True)
        with treatment.applied(nn.ModuleList(blocks), blocks, [1]):
            blocks[0](x)  # traced at the first call
            kept = saved(lambda: blocks[0](x), but=(x, *blocks[0].parameters()))
    assert kept == 2 * 4 * 32 * 4


def test_without_gradients_a_block_is_not_traced(block: Any, stream: Any) -> None:
    with FakeTensorMode(), torch.no_grad():
        one, inputs = block(small=True), stream(64, small=True)
        with apply_compile([one]):
            assert one(*inputs).shape == inputs[0].shape
            assert not one.forward.cache


@pytest.mark.slow
def test_the_trace_itself_takes_nothing(block: Any, stream: Any) -> None:
    recorder = Recorder()
    with FakeTensorMode(), recorder, lowering("cuda"):
        one, inputs = block(small=True), stream(64, small=True)
        recorder.mark("", "begin")
        with apply_compile([one]):
            one(*inputs)
    recorder.storages.release()
    assert {r.name for r in recorder.touches if r.what == "take"} <= {
        "aten::empty_strided",
        "shardwright::workspace",
    }


def test_core_attention_is_refused_for_compiled_blocks() -> None:
    with pytest.raises(UnsupportedError, match=r"got 'core_attention'\. Use none, full, selective"):
        apply_compile([nn.Linear(2, 2)], "core_attention")


def test_a_checkpointed_block_is_not_compiled() -> None:
    layer = nn.Linear(2, 2)
    with (
        apply_checkpointing([layer], "full"),
        pytest.raises(InputError, match="Let apply_compile do the checkpointing"),
    ):
        apply_compile([layer])


@pytest.mark.slow
def test_a_block_keeps_nothing_of_what_it_was_traced_with(block: Any, stream: Any) -> None:
    with FakeTensorMode(), lowering("cuda"):
        blocks = [block(small=True) for _ in range(2)]
        given, cosine, sine = stream(64, small=True)
        recorder = Recorder()
        with apply_compile(blocks), recorder:
            result = given * 1  # as a layer before makes it
            for each in blocks:
                result = each(result, cosine, sine)
            result.sum().backward()
            del result
            for tensor in (given, *(p for each in blocks for p in each.parameters())):
                tensor.grad = None
            assert recorder.storages.total() == sum(
                t.untyped_storage().nbytes()
                for t in (given, cosine, sine, *(p for e in blocks for p in e.parameters()))
                if recorder.storages.held(t)
            )
        recorder.storages.release()
