"""Megatron-LM's layers compute what the others do, and keep what Megatron-LM keeps."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, linear

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.megatron import MegatronSettings
from shardwright.models.llama import Llama, LlamaBlock

LENGTH, BATCH = 16, 2
LLAMA = LlamaShape(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, vocab=64)
GPT = msgspec.structs.replace(
    LLAMA,
    kv_heads=4,
    layer_norm=True,
    ungated=True,
    activation="gelu_tanh",
    positions=LENGTH,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied_embeddings=True,
)


EXPERTS = msgspec.structs.replace(
    LLAMA,
    kv_heads=4,
    head_dim=12,
    q_lora_rank=20,
    kv_lora_rank=10,
    qk_rope_head_dim=4,
    v_head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_ffn_dim=24,
    shared_ffn_dim=16,
    moe_layers=(0, 1),
)


@pytest.mark.parametrize("shape", [LLAMA, GPT, EXPERTS])
@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize("loss", ["none", "native", "te", "gathered"])
def test_results_and_gradients_are_those_of_the_other_layers(
    shape: LlamaShape, backend: str, loss: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 64, (2, BATCH, LENGTH), generator=generator)
    of_loss: dict[str, object] = {"cross_entropy_loss_fusion": loss}
    if loss == "gathered":
        of_loss = {"parallel_output": False}
    settings = msgspec.convert({"attention_backend": backend} | of_loss, MegatronSettings)
    other = Llama(shape, sequence=LENGTH)
    model = Llama(shape, LocalShape(megatron=settings), sequence=LENGTH)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(tokens), other(tokens))
    found, wanted = (
        torch.autograd.grad(each.loss(each(tokens), targets), tuple(each.parameters()))
        for each in (model, other)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shape", [LLAMA, GPT, EXPERTS])
def test_further_tokens_are_predicted_from_the_stream_and_what_follows(shape: LlamaShape) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 64, (2, BATCH, LENGTH), generator=generator)
    shape = msgspec.structs.replace(shape, mtp_layers=2)
    model = Llama(shape, LocalShape(megatron=MegatronSettings()), sequence=LENGTH)
    names = [(name, tuple(its.shape)) for name, its in model.named_parameters()]
    assert names == list(shape.tensors)
    stream = model.tok_embeddings(tokens)
    for layer in model.layers.values():
        stream = layer(stream, model.cos, model.sin)
    stream = model.norm(stream)
    wanted = cross_entropy(model.output(stream).flatten(0, 1), targets.flatten())
    for k, own in enumerate(model.mtp, 1):
        block = LlamaBlock(shape, LocalShape(), shape.layers)
        block.load_state_dict(own.state_dict(), strict=False)
        following = own.enorm(model.tok_embeddings(targets.roll(1 - k, 1)))
        stream = linear(torch.cat((following, own.hnorm(stream)), -1), own.eh_proj.weight)
        stream = own.norm(block(stream, model.cos, model.sin))
        logits = model.output(stream[:, :-k])
        further = cross_entropy(logits.flatten(0, 1), targets[:, k:].flatten())
        wanted = wanted + 0.1 / 2 * further
    found = model.loss(model(tokens, targets), targets)
    torch.testing.assert_close(found, wanted)
    shared = (model.output.weight, model.mtp[0].eh_proj.weight, model.mtp[1].norm.weight)
    gradients = (torch.autograd.grad(each, shared) for each in (found, wanted))
    torch.testing.assert_close(*gradients)


def test_a_last_stage_embeds_what_follows_and_each_further_token_has_a_loss() -> None:
    settings = MegatronSettings(cross_entropy_loss_fusion="native")
    kept: list[int] = []
    for further in (0, 1, 2):
        shape = msgspec.structs.replace(LLAMA, vocab=4096, mtp_layers=further)
        local = LocalShape(first=False, tensor=2, sequence_parallel=True, megatron=settings)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            return tensor

        with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
            model = Llama(shape, local, sequence=LENGTH, dtype=torch.bfloat16)
            assert hasattr(model, "tok_embeddings") == bool(further)
            stream = torch.zeros(BATCH, LENGTH // 2, shape.dim, dtype=torch.bfloat16)
            targets = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            given = (stream.requires_grad_(), targets)[: 2 if further else 1]
            loss = model.loss(model(*given), targets)
        assert loss.ndim == 0
        kept.append(sum(size for size in sizes.values() if size == BATCH * LENGTH * 2048 * 4))
    assert kept == [BATCH * LENGTH * 2048 * 4 * (1 + further) for further in (0, 1, 2)]


def _kept(settings: MegatronSettings, shape: LlamaShape = GPT, **local: int | bool) -> int:
    """Bytes that a forward of bf16 keeps beside parameters and logits."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        part = LocalShape(megatron=settings, **local)  # type: ignore[arg-type]
        model = Llama(shape, part, sequence=LENGTH, dtype=torch.bfloat16)
        logits = model(torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    assert logits.shape[-1] == 64 // part.tensor
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


ONE = BATCH * LENGTH * GPT.dim * 2  # bytes of the stream
SCORES = BATCH * GPT.heads * LENGTH * LENGTH * 2


def test_an_unfused_attention_keeps_shares_and_dropout_what_is_left_of_them() -> None:
    fused, unfused = (
        _kept(MegatronSettings(attention_backend=name)) for name in ("fused", "unfused")
    )
    sums = BATCH * GPT.heads * LENGTH * 4
    assert unfused - fused == GPT.layers * (SCORES - sums)
    flash = _kept(MegatronSettings(attention_backend="flash"))
    assert flash - fused == GPT.layers * ONE
    # Shares once more, and a mask of a byte each; a CPU's mask has the dtype of what it masks.
    dropped = msgspec.structs.replace(GPT, attention_dropout=0.1)
    more = _kept(MegatronSettings(attention_backend="unfused"), dropped)
    assert more - unfused == GPT.layers * 2 * SCORES


@pytest.mark.parametrize("width", [1, 2])
def test_experts_keep_rows_once_and_what_their_activation_is_given_and_gives(width: int) -> None:
    divided = {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": width}
    one, two = (
        _kept(MegatronSettings(), msgspec.structs.replace(EXPERTS, expert_ffn_dim=wide), **divided)
        for wide in (24, 48)
    )
    # Each of 2 tensor ranks routes its tokens twice, and those that share a width have them all.
    rows = BATCH * LENGTH // 2 * EXPERTS.experts_per_token * width
    assert two - one == EXPERTS.layers * rows * 3 * (24 // width) * 2


def test_a_deterministic_sum_of_rows_keeps_them() -> None:
    divided = {"tensor": 2, "sequence_parallel": True, "expert": 2}
    usual, exact = (
        _kept(MegatronSettings(deterministic_mode=exact), EXPERTS, **divided)
        for exact in (False, True)
    )
    rows = BATCH * LENGTH // 2 * EXPERTS.experts_per_token
    assert exact - usual == EXPERTS.layers * rows * EXPERTS.dim * 2


def test_products_keep_their_part_of_the_tokens() -> None:
    whole = _kept(MegatronSettings(), tensor=2)
    parts = _kept(MegatronSettings(), tensor=2, sequence_parallel=True)
    # Of each norm what it is given and what it gives: halves of them go.
    statistics = 2 * BATCH * LENGTH * 2  # bf16 on a CPU
    assert whole - parts == (2 * GPT.layers + 1) * (2 * ONE + statistics) // 2


def test_logits_that_are_gathered_are_whole_and_the_loss_keeps_theirs_of_all_words() -> None:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.float32:
            kept[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    settings = MegatronSettings(parallel_output=False)
    with FakeTensorMode():
        model = Llama(
            LLAMA, LocalShape(tensor=2, megatron=settings), sequence=LENGTH, dtype=torch.bfloat16
        )
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        logits = model(tokens)
        assert (logits.shape, logits.dtype) == ((BATCH, LENGTH, 64), torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
            loss = model.loss(logits, tokens)
        loss.backward()
    assert max(kept.values()) == BATCH * LENGTH * 64 * 4
    assert sum(kept.values()) < 1.1 * BATCH * LENGTH * 64 * 4
    assert model.output.weight.shape[0] == 32


def test_a_product_may_add_gradients_to_the_runtimes_buffer_itself() -> None:
    for fused in (True, False):
        settings = MegatronSettings(gradient_accumulation_fusion=fused)
        with FakeTensorMode():
            model = Llama(LLAMA, LocalShape(megatron=settings), sequence=LENGTH)
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            model.loss(model(tokens), tokens).backward()
        without = [name for name, each in model.named_parameters() if each.grad is None]
        assert ("layers.0.attention.wq.weight" in without) is fused
        assert "norm.weight" not in without
