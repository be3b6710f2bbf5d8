from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.errors import InputError
from shardwright.core.llama import LlamaShape, LocalShape, check_local, check_shape
from shardwright.models.llama import Llama

SMALL = LlamaShape(
    layers=2, dim=64, heads=8, kv_heads=4, head_dim=8, ffn_dim=96, vocab=128, qk_norm=True
)
MIXED = msgspec.structs.replace(
    SMALL,
    experts=8,
    experts_per_token=2,
    expert_ffn_dim=48,
    shared_ffn_dim=32,
    shared_gate=True,
    moe_layers=(1,),
)
LATENT = msgspec.structs.replace(
    SMALL,
    kv_heads=8,
    qk_norm=False,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
GPT = msgspec.structs.replace(
    MIXED, layer_norm=True, ungated=True, positions=16, output_bias=True, mlp_bias=True
)
OSS = msgspec.structs.replace(
    MIXED, attention_bias=True, output_bias=True, sinks=True, expert_bias=True
)
ADAPTED = msgspec.structs.replace(
    MIXED, attention_bias=True, output_bias=True, mlp_bias=True, lora=3
)
GEMMA = msgspec.structs.replace(SMALL, qk_norm=False, post_norms=True)


def _sizes(shape: LlamaShape, local: LocalShape) -> dict[str, tuple[int, ...]]:
    """The parameters of a rank's part."""
    with FakeTensorMode():
        model = Llama(shape, local, sequence=8)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _count(shape: LlamaShape, local: LocalShape) -> int:
    return sum(prod(size) for size in _sizes(shape, local).values())


def _with(**changes: Any) -> LlamaShape:
    return msgspec.structs.replace(SMALL, **changes)


@pytest.mark.parametrize("shape", [SMALL, MIXED, LATENT, GEMMA, GPT, ADAPTED, OSS])
def test_a_rank_of_an_undivided_model_holds_every_tensor(shape: LlamaShape) -> None:
    assert _sizes(shape, LocalShape()) == dict(shape.tensors)


def test_only_adapters_are_trained_where_there_are_some() -> None:
    with FakeTensorMode():
        model = Llama(ADAPTED, sequence=8)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained}
    assert of == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert ADAPTED.trained_count == sum(p.numel() for p in trained.values())
    assert MIXED.trained_count == MIXED.parameter_count
    without = msgspec.structs.replace(ADAPTED, lora=msgspec.UNSET).parameter_count
    assert ADAPTED.parameter_count == without + ADAPTED.trained_count
    assert not any(".experts." in name or "router" in name for name in trained)


def test_a_tied_head_is_no_tensor_of_its_own_and_a_copy_on_a_stage_of_its_own() -> None:
    tied = _with(tied_embeddings=True)
    assert SMALL.parameter_count - tied.parameter_count == 128 * 64
    assert "output.weight" not in dict(tied.tensors)
    last = _sizes(tied, LocalShape(first=False, layers=(1, 2)))
    assert last["output.weight"] == (128, 64)


def test_stages_of_a_pipeline_hold_the_model_together() -> None:
    stages = [
        LocalShape(first=True, last=False, layers=(0, 1)),
        LocalShape(first=False, last=True, layers=(1, 2)),
    ]
    names = [name for stage in stages for name in _sizes(MIXED, stage)]
    assert sorted(names) == sorted(name for name, _ in MIXED.tensors)


def test_tensor_ranks_share_all_but_norms_routers_and_gates() -> None:
    whole = dict(MIXED.tensors)
    alike = ("norm", "router", "shared_gate")
    for name, size in _sizes(MIXED, LocalShape(tensor=4)).items():
        degree = 1 if any(word in name for word in alike) else 4
        assert prod(size) * degree == prod(whole[name]), name


def test_what_latent_attention_shares_among_heads_is_whole_on_every_tensor_rank() -> None:
    whole = dict(LATENT.tensors)
    shared = ("norm", "wq_a", "wkv_a")
    for name, size in _sizes(LATENT, LocalShape(tensor=4)).items():
        degree = 1 if any(word in name for word in shared) else 4
        assert prod(size) * degree == prod(whole[name]), name


def test_experts_of_expert_ranks_are_whole_and_nothing_else_changes() -> None:
    whole, local = dict(MIXED.tensors), _sizes(MIXED, LocalShape(expert=4))
    assert local["layers.1.moe.experts.w1"] == (2, 48, 64)
    assert {name for name in whole if whole[name] != local[name]} == {
        f"layers.1.moe.experts.w{i}" for i in (1, 2, 3)
    }
    both = _sizes(MIXED, LocalShape(expert=4, tensor=2))
    assert both["layers.1.moe.experts.w1"] == (2, 48, 64)


def test_fewer_heads_of_keys_than_ranks_are_held_by_several() -> None:
    size = _sizes(SMALL, LocalShape(tensor=8))
    assert (size["layers.0.attention.wq.weight"], size["layers.0.attention.wk.weight"]) == (
        (8, 64),
        (8, 64),
    )


def test_a_vocabulary_that_does_not_divide_is_rounded_up() -> None:
    assert _sizes(_with(vocab=127), LocalShape(tensor=2))["output.weight"] == (64, 64)


def test_context_ranks_hold_the_same() -> None:
    assert _count(SMALL, LocalShape(context=8)) == SMALL.parameter_count


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("expert", [1, 2])
def test_experts_work_on_the_rows_that_ranks_send(tensor: int, expert: int) -> None:
    local = LocalShape(tensor=tensor, expert=expert)
    rows = local.routed_rows(MIXED, 100)
    assert rows == (100 if tensor == expert == 2 else 200)
    assert local.received_rows(MIXED, rows) == rows


def test_a_load_and_a_capacity_change_the_rows_that_are_received() -> None:
    assert LocalShape(expert=2, expert_load=1.5).received_rows(MIXED, 200) == 300
    assert LocalShape(expert=2, capacity_factor=1.25).received_rows(MIXED, 200) == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "model.kv_heads: expected a divisor of the 8 heads, got 3."),
        ({"head_dim": 7}, "model.head_dim: expected an even number, got 7."),
        (
            {"qk_rope_head_dim": 3, "kv_lora_rank": 8},
            "model.qk_rope_head_dim: expected an even number, got 3.",
        ),
        ({"v_head_dim": 4}, "model.kv_lora_rank: expected at least 1 beside v_head_dim, got none."),
        (
            {"kv_lora_rank": 8, "qk_rope_head_dim": 8},
            "model.qk_rope_head_dim: expected a part of head_dim 8 beside kv_lora_rank, got 8.",
        ),
        (
            {"kv_lora_rank": 8, "qk_rope_head_dim": 4},
            "model.kv_heads: expected 8 beside kv_lora_rank, got 4.",
        ),
        ({"moe_layers": (2,)}, "model.moe_layers: expected layers below 2, got 2."),
        ({"moe_layers": (1,)}, "model.experts_per_token: expected from 1 to the 0 experts, got 0."),
        ({"ffn_dim": 0}, "model.ffn_dim: expected at least 1, got 0."),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_shape(_with(**changes))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("shape", "local", "message"),
    [
        (SMALL, LocalShape(tensor=3), "parallel.tensor: expected a divisor of the 8 heads, got 3."),
        (
            _with(ffn_dim=99),
            LocalShape(tensor=2),
            "parallel.tensor: expected a divisor of the 99 columns of the MLP, got 2.",
        ),
        (
            SMALL,
            LocalShape(expert=2),
            "parallel.expert: expected 1 for a model without experts, got 2.",
        ),
        (MIXED, LocalShape(expert=3), "parallel.expert: expected a divisor of the 8 experts"),
        (
            MIXED,
            LocalShape(capacity_factor=1.0),
            "parallel.expert: expected more than 1 where experts have a capacity or a load",
        ),
        (SMALL, LocalShape(layers=(1, 3)), "layers: expected a range of the 2 layers, got 1 to 3."),
    ],
)
def test_degrees_that_do_not_divide_are_refused(
    shape: LlamaShape, local: LocalShape, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_local(shape, local)
    assert str(caught.value).startswith(message)
