"""A trace on CPU tensors keeps what CUDA's kernels do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attention_by_name
from torch.utils.checkpoint import checkpoint

from shardwright.core.errors import InputError
from shardwright.trace.lowering import lowering, unknown_operators
from shardwright.trace.lowering.functions import cross_entropy as fused_cross_entropy
from shardwright.trace.lowering.functions import rms_norm as fused_rms_norm
from shardwright.trace.lowering.kernels import ENTRIES, aten_name, kernels, table
from shardwright.trace.recorder import Recorder

MIB = 2**20
BF16 = torch.bfloat16
RANDOM_STATE = 24  # bytes: two uint64 and one


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=BF16, requires_grad=True)


def seen(run: Any, **options: Any) -> Recorder:
    recorder = Recorder()
    with FakeTensorMode(), recorder, lowering("cuda", **options):
        result = run()
        if isinstance(result, torch.Tensor):
            result.sum().backward()
    recorder.storages.release()
    return recorder


def inner(recorder: Recorder) -> list[int]:
    taken = (r for r in recorder.touches if r.what == "take")
    return [r.nbytes for r in taken if r.name == "shardwright::workspace"]


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", 1795.0625 * MIB), ("cuda", 1411.0625 * MIB + RANDOM_STATE)]
)
def test_a_block_of_8b_saves_a_fifth_less_on_cuda(
    saved: Any, block: Any, stream: Any, device: str, expected: float
) -> None:
    with FakeTensorMode(), lowering(device):
        model, inputs = block(), stream()
        assert saved(lambda: model(*inputs), tuple(model.parameters())) == expected


def test_the_math_kernel_saves_the_square_of_the_sequence(
    saved: Any, block: Any, stream: Any
) -> None:
    with FakeTensorMode(), lowering("cuda", attention="math"):
        model, inputs = block(), stream()
        most = saved(lambda: model(*inputs), tuple(model.parameters()))
    assert most > 32 * 8192 * 8192 * 4  # the fp32 softmax of 32 heads


@pytest.mark.parametrize(
    ("wanted", "query", "key", "options", "taken"),
    [
        ("flash", (1, 4, 32, 16), (1, 4, 32, 16), {}, "flash_attention"),
        ("flash", (1, 4, 32, 16), (1, 2, 32, 16), {"enable_gqa": True}, "flash_attention"),
        ("cudnn", (1, 4, 32, 16), (1, 4, 32, 16), {}, "cudnn_attention"),
        ("cudnn", (1, 4, 32, 192), (1, 4, 32, 192), {}, "flash_attention"),
        ("flash", (1, 4, 32, 16), (1, 4, 48, 16), {"is_causal": True}, "efficient_attention"),
        ("flash", (1, 4, 32, 264), (1, 4, 32, 264), {}, "efficient_attention"),
        ("efficient", (1, 4, 32, 16), (1, 2, 32, 16), {"enable_gqa": True}, "flash_attention"),
    ],
)
def test_a_kernel_that_does_not_take_the_inputs_gives_way_to_the_next(
    wanted: str, query: Any, key: Any, options: dict[str, Any], taken: str
) -> None:
    recorder = seen(
        lambda: functional.scaled_dot_product_attention(
            half(*query), half(*key), half(*key), **options
        ),
        attention=wanted,
    )
    assert f"aten::_scaled_dot_product_{taken}" in recorder.operators


def test_attention_with_a_mask_runs_the_efficient_kernel_with_aligned_rows() -> None:
    with FakeTensorMode(), lowering("cuda"):
        mask = torch.empty(30, 30, dtype=torch.bool)
        query = half(2, 4, 30, 16)
        result = functional.scaled_dot_product_attention(query, query, query, mask)
        bias = result.grad_fn._saved_attn_bias
        assert bias.untyped_storage().nbytes() == 2 * 4 * 30 * 32 * 2


def test_flash_attention_with_an_odd_head_size_saves_padded_copies(saved: Any) -> None:
    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(*(half(1, 2, 32, 12) for _ in range(3)))

    with FakeTensorMode(), lowering("cuda"):
        assert saved(run) == 4 * 2 * 32 * 16 * 2 + 2 * 32 * 4 + RANDOM_STATE


def test_the_backward_of_flash_attention_takes_an_fp32_sum_and_gradients_of_every_head() -> None:
    def run() -> torch.Tensor:
        query, key = half(1, 4, 256, 64), half(1, 2, 256, 64)
        return functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    assert inner(seen(run)) == [4 * 256 * (64 + 1) * 4 + 2 * 4 * 256 * 64 * 2]


def test_the_backward_of_a_softmax_takes_the_product_of_gradient_and_result() -> None:
    assert inner(seen(lambda: half(8, 64).softmax(-1))) == [8 * 64 * 2]


def test_the_backward_of_an_embedding_sorts_and_sums_in_fp32() -> None:
    count, rows, width = 4096, 100, 64

    def run() -> torch.Tensor:
        words = nn.Embedding(rows, width, dtype=BF16)
        return words(torch.empty(count, dtype=torch.long))

    (taken,) = inner(seen(run))
    partial = count // 10 + rows
    assert taken == (2 * count + count + 2 * rows + partial) * 8 + partial * width * 4


def test_few_tokens_need_no_sorting() -> None:
    def run() -> torch.Tensor:
        return nn.Embedding(100, 64)(torch.empty(3072, dtype=torch.long))

    assert inner(seen(run)) == []


def test_dropout_saves_one_byte_an_element(saved: Any) -> None:
    with FakeTensorMode(), lowering("cuda"):
        layer, x = nn.Dropout(0.1), half(4, 128)
        assert saved(lambda: layer(x)) == 4 * 128


def test_layer_norm_saves_its_statistics_in_fp32(saved: Any) -> None:
    with FakeTensorMode(), lowering("cuda"):
        layer, x = nn.LayerNorm(64, dtype=BF16), half(32, 64)
        assert saved(lambda: layer(x), tuple(layer.parameters())) == 32 * 64 * 2 + 2 * 32 * 4


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_fused_norm_computes_what_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(6, 32), torch.randn(32), torch.randn(6, 32)
    found = []
    for norm in (fused_rms_norm, functional.rms_norm):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        result = norm(leaves[0], (32,), leaves[1], 1e-5)
        result.backward(grad.to(dtype))
        found.append((result, leaves[0].grad, leaves[1].grad))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_a_norm_with_a_weight_of_another_dtype_is_not_fused() -> None:
    def run(dtype: torch.dtype) -> set[str]:
        def norm() -> torch.Tensor:
            with warnings.catch_warnings():  # torch says so once in a process
                warnings.filterwarnings("ignore", "Mismatch dtype")
                return torch.rms_norm(half(4, 8), (8,), torch.empty(8, dtype=dtype))

        return seen(norm).operators

    assert "shardwright::_fused_rms_norm" in run(BF16)
    assert "shardwright::_fused_rms_norm" not in run(torch.float32)


def test_the_fused_loss_computes_what_torch_does_and_saves_the_logits_alone(saved: Any) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 7), torch.tensor([0, 3, -100, 6, 1])
    ours, torchs = (logits.clone().requires_grad_() for _ in range(2))
    loss = fused_cross_entropy(ours * 1, target)
    loss.backward()
    wanted = functional.cross_entropy(torchs, target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ours.grad, torchs.grad)
    with FakeTensorMode(), lowering("cuda", cross_entropy="fused"):
        wide, words = half(64, 1000).clone(), torch.empty(64, dtype=torch.long)
        assert saved(lambda: functional.cross_entropy(wide, words)) == 64 * 1000 * 2


def test_attention_inside_another_function_is_lowered_too() -> None:
    def run() -> torch.Tensor:
        x = half(2, 32, 64)
        layer = nn.MultiheadAttention(64, 4, batch_first=True, dtype=BF16)
        return layer(x, x, x, need_weights=False)[0]

    assert "aten::_scaled_dot_product_flash_attention" in seen(run).operators


def test_a_function_imported_by_name_is_lowered_in_forward_and_in_recomputation() -> None:
    def run() -> torch.Tensor:
        x = half(1, 2, 32, 16)
        return checkpoint(attention_by_name, x, x, x, use_reentrant=False)

    recorder = seen(run)
    names = [r.name for r in recorder.touches if r.what == "take"]
    assert names.count("aten::_scaled_dot_product_flash_attention") >= 2 * 2
    assert not any("for_cpu" in name for name in recorder.operators)


def test_everything_is_as_before_afterwards_whatever_happened_inside() -> None:
    engine = torch.autograd._engine_run_backward
    kept = []

    def fail() -> None:
        with lowering("cuda"):
            kept.append(functional.scaled_dot_product_attention)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert kept[0] is not attention_by_name
    assert functional.scaled_dot_product_attention is attention_by_name
    assert torch.autograd._engine_run_backward is engine
    query = torch.randn(1, 2, 8, 16)
    torch.testing.assert_close(
        kept[0](query, query, query), attention_by_name(query, query, query)
    )  # a module imported inside may have kept the name


def test_an_operator_in_no_table_is_named() -> None:
    names = ("aten::mm", "aten::transpose", "aten::add_", "aten::convolution", "mine::kernel")
    assert unknown_operators(names) == ("aten::convolution", "mine::kernel")
    assert unknown_operators(names, "cpu") == ()


def test_a_training_step_of_a_transformer_has_no_unknown_operators() -> None:
    def run() -> torch.Tensor:
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, dtype=BF16)
        words, tokens = nn.Embedding(4096, 64, dtype=BF16), torch.empty(2, 2048, dtype=torch.long)
        logits = layer(words(tokens)) @ words.weight.T
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    assert unknown_operators(seen(run).operators) == ()


def test_a_stand_in_answers_to_the_name_of_what_it_stands_for() -> None:
    assert aten_name("shardwright::_fused_rms_norm") == "aten::_fused_rms_norm"
    assert aten_name("shardwright::reduce_scatter") == "_c10d_functional::reduce_scatter_tensor"
    assert aten_name("aten::mm") == "aten::mm"


def test_a_kernel_nobody_has_is_refused() -> None:
    message = (
        "lowering.attention: expected flash or cudnn or efficient or math or eager, got 'ring'."
    )
    with pytest.raises(InputError, match=message):
        kernels(attention="ring")


def test_the_table_shows_every_entry_with_its_source() -> None:
    text = table()
    assert text.count("\n") == len(ENTRIES) + 2
    assert all(entry.source in text for entry in ENTRIES)


def test_eager_attention_keeps_its_shares_in_fp32_and_in_the_dtype_of_values(saved: Any) -> None:
    def run() -> torch.Tensor:
        parts = (half(1, heads, 32, 16) for heads in (4, 2, 2))
        attend = functional.scaled_dot_product_attention
        return attend(*parts, is_causal=True, enable_gqa=True)

    scores = 4 * 32 * 32
    with FakeTensorMode(), lowering("cuda", attention="eager"):
        eager = saved(run)
    assert scores * (4 + 2) < eager < scores * (4 + 2 + 1) + 5 * 4 * 32 * 16 * 2
