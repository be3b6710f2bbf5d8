"""What a forward keeps under the checkpointing policies that a job can name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from shardwright.core.errors import InputError
from shardwright.core.llama import LocalShape
from shardwright.trace import checkpointing
from shardwright.trace.checkpointing import NAMES, apply_checkpointing, policy
from shardwright.trace.lowering import lowering

MIB = 2**20
HIDDEN, WIDE, KEYS = 64 * MIB, 224 * MIB, 16 * MIB  # of 8B at a sequence of 8192 in bf16
SUMS, RANDOM_STATE = 1 * MIB, 24

Step = Callable[..., tuple[int, int, set[str]]]


def treated(name: str) -> Any:
    return partial(apply_checkpointing, policy_name=name)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_policies_rank_as_they_should_on_8b(step: Step, device: str) -> None:
    names = ("full", "selective", "save:aten.mm", "core_attention", "none")
    measured = [step(treated(name), partial(lowering, device)) for name in names]
    after, peaks = ([each[k] for each in measured] for k in (0, 1))
    assert after == sorted(set(after))
    assert peaks == sorted(set(peaks))


def test_full_keeps_the_blocks_inputs(step: Step) -> None:
    after, _, _ = step(treated("full"), partial(lowering, "cuda"))
    assert after == 2 * HIDDEN  # the second's input and the last result; the first's is not ours


def test_selective_keeps_every_second_product_and_attention(step: Step) -> None:
    after, _, _ = step(treated("selective"), partial(lowering, "cuda"))
    products = HIDDEN + KEYS + WIDE + HIDDEN  # query, value, gate, down
    attention = HIDDEN + SUMS + RANDOM_STATE
    assert after == 2 * (products + attention) + 2 * HIDDEN


def test_the_names_of_titan_and_of_the_job_are_one_policy() -> None:
    assert policy("selective").kept == policy("selective_op").kept
    assert policy("selective").alternate == policy("selective_op").alternate


def test_core_attention_keeps_no_log_sums(step: Step) -> None:
    none, _, _ = step(treated("none"), partial(lowering, "cuda"))
    after, _, operators = step(treated("core_attention"), partial(lowering, "cuda"))
    assert none - after == 2 * (SUMS + RANDOM_STATE)
    assert "aten::_scaled_dot_product_flash_attention" in operators


def test_core_attention_of_its_own_module_is_recomputed_as_one(saved: Any) -> None:
    class Core(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.mT).softmax(-1) @ x

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention = Core()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.core_attention(x)

    with FakeTensorMode():
        block, x = Attention(), torch.empty(8, 4, requires_grad=True)
        assert saved(lambda: block(x)) == 8 * 4 * 4 + 8 * 8 * 4
        with apply_checkpointing([block], "core_attention") as applied:
            assert applied.blocks == [block.core_attention]
            assert saved(lambda: block(x)) == 8 * 4 * 4


@pytest.mark.parametrize(("name", "picked"), [("layers:2", [1, 3]), ("first:2", [0, 1])])
def test_a_policy_picks_blocks_by_their_places(block: Any, name: str, picked: list[int]) -> None:
    with FakeTensorMode():
        blocks = [block(small=True) for _ in range(5)]
    with apply_checkpointing(blocks, name) as applied:
        assert applied.blocks == [blocks[k] for k in picked]
    assert checkpointing.treated(range(5), policy(name)) == picked  # so an estimate counts them


def test_selective_keeps_what_a_reduce_scatter_returned(step: Step) -> None:
    local = LocalShape(tensor=8, sequence_parallel=True)
    kept, _, operators = step(treated("selective"), partial(lowering, "cuda"), 2, local)
    without, _, _ = step(
        treated("save:aten._scaled_dot_product_flash_attention"),
        partial(lowering, "cuda"),
        2,
        local,
    )
    assert "shardwright::reduce_scatter" in operators
    scattered = 2 * HIDDEN // 8  # after attention and after the feed-forward
    products = HIDDEN // 8 + KEYS // 8 + WIDE // 8 + HIDDEN
    assert kept - without == 2 * (scattered + products)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads)
        return x + functional.gelu(self.second(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    "name", ["full", "selective", "core_attention", "layers:1", "save:aten::addmm"]
)
def test_gradients_do_not_change(name: str) -> None:
    torch.manual_seed(0)
    blocks, x = [Net(), Net()], torch.randn(2, 6, 16)

    def gradients() -> list[torch.Tensor]:
        result = x
        for block in blocks:
            result = block(result)
        leaves = [p for block in blocks for p in block.parameters()]
        return list(torch.autograd.grad(result.sum(), leaves))

    plain = gradients()
    with apply_checkpointing(blocks, name) as applied:
        assert applied.blocks
        checkpointed = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert not any("forward" in vars(block) for block in blocks)


def test_a_block_is_not_checkpointed_twice() -> None:
    block = Net()
    with (
        apply_checkpointing([block], "full"),
        pytest.raises(InputError, match="Net: expected a block that is not checkpointed yet"),
    ):
        apply_checkpointing([block], "selective")


@pytest.mark.parametrize("name", ["", "some", "layers:0", "layers:x", "save:"])
def test_an_unknown_policy_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(InputError) as error:
        policy(name)
    assert str(error.value) == (
        f"memory.checkpointing: expected {NAMES}, got '{name}'. Choose one of these policies."
    )


def test_an_operator_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"got 'aten\.mmm' in 'save:aten\.mm,aten\.mmm'"):
        policy("save:aten.mm,aten.mmm")
