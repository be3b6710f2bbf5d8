from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.llama import LlamaShape, LocalShape, check_local
from shardwright.models.llama import Llama, chunked_loss, loss, parallel_loss
from shardwright.models.llama.layers import capped
from shardwright.models.transformer import next_token_loss
from shardwright.trace.treatment import Treatment

LENGTH = 16
DENSE = LlamaShape(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, vocab=64)
EXPERTS = msgspec.structs.replace(
    DENSE,
    experts=4,
    experts_per_token=2,
    expert_ffn_dim=24,
    shared_ffn_dim=16,
    shared_gate=True,
    moe_layers=(0, 1),
)
FULL = msgspec.structs.replace(
    DENSE, qk_norm=True, attention_bias=True, output_bias=True, mlp_bias=True, tied_embeddings=True
)
LATENT = msgspec.structs.replace(
    EXPERTS,
    kv_heads=4,
    head_dim=12,
    q_lora_rank=20,
    kv_lora_rank=10,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
AT_ONCE = msgspec.structs.replace(LATENT, q_lora_rank=0, v_head_dim=0)
GEMMA = msgspec.structs.replace(
    DENSE,
    tied_embeddings=True,
    activation="gelu_tanh",
    post_norms=True,
    scaled_embedding=True,
    logit_cap=3.0,
    attention_cap=0.1,
)
GPT = msgspec.structs.replace(
    FULL,
    kv_heads=4,
    layer_norm=True,
    ungated=True,
    activation="gelu_tanh",
    positions=LENGTH,
)
DROPPED = msgspec.structs.replace(GPT, dropout=0.1, attention_dropout=0.1)
SQUARED = msgspec.structs.replace(
    EXPERTS, ungated=True, activation="squared_relu", positions="none"
)
OSS = msgspec.structs.replace(
    EXPERTS,
    shared_ffn_dim=0,
    shared_gate=False,
    activation="clipped_silu",
    attention_bias=True,
    output_bias=True,
    sinks=True,
    expert_bias=True,
)
SHAPES = {
    "dense": DENSE,
    "experts": EXPERTS,
    "full": FULL,
    "latent": LATENT,
    "latent with queries at once": AT_ONCE,
    "gemma": GEMMA,
    "gpt": GPT,
    "squared": SQUARED,
    "gpt-oss": OSS,
}
BATCH = 2
WHOLE = LocalShape()
ADAPTED = msgspec.structs.replace(FULL, lora=3)

DIVISIONS = {
    "tensor": LocalShape(tensor=2),
    "sequence": LocalShape(tensor=2, sequence_parallel=True),
    "more tensor ranks than heads of keys": LocalShape(tensor=4, sequence_parallel=True),
    "context": LocalShape(context=4),
    "parallel loss": LocalShape(tensor=2, sequence_parallel=True, loss="parallel"),
    "chunked loss": LocalShape(tensor=2, loss="chunked"),
    "first stage": LocalShape(last=False, layers=(0, 1)),
    "middle stage": LocalShape(first=False, last=False, layers=(1, 2), tensor=2),
    "last stage": LocalShape(first=False, layers=(1, 2), tensor=2, sequence_parallel=True),
}
EXPERT_DIVISIONS = {
    "experts": LocalShape(expert=2),
    "experts of tensor ranks": LocalShape(expert=4, tensor=2, sequence_parallel=True),
    "loaded experts": LocalShape(expert=4, expert_load=1.5),
    "experts with a capacity": LocalShape(expert=4, capacity_factor=1.25, context=2),
}


def _tokens(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (BATCH, length), generator=generator)


def _restless(shape: LlamaShape) -> Llama:
    """A model whose norms and biases matter too."""
    model = Llama(shape, sequence=LENGTH)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def _normed(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[T, width], element i paired with i + width / 2 as one complex number."""
    length, width = x.shape
    pairs = torch.complex(x[:, : width // 2], x[:, width // 2 :])
    speed = theta ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * speed
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cap: float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """One head [T, width] each: what comes before is averaged by the softmax of products."""
    length, width = query.shape
    later = torch.ones(length, length).triu(1).bool()
    scores = query @ key.T / width**0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(later, float("-inf"))
    if sink is not None:  # one more share, of nothing
        return torch.cat((scores, sink.expand(length, 1)), -1).softmax(-1)[:, :-1] @ value
    return scores.softmax(-1) @ value


class Reference:
    """The same model one sample, head and token at a time, from its tensors alone."""

    def __init__(self, model: Llama) -> None:
        self.shape = model.shape
        self.values = dict(model.named_parameters())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.values["tok_embeddings.weight"][tokens]
        if self.shape.scaled_embedding:
            x = x * self.shape.dim**0.5
        if self.shape.learned_positions:
            x = x + self.values["tok_embeddings.positions"][: len(x)]
        for layer in range(self.shape.layers):
            name = f"layers.{layer}."
            attention = self._latent if self.shape.kv_lora_rank else self._attention
            found = attention(self._norm(x, name + "attention_norm"), name + "attention.")
            x = x + self._after(found, name + "post_attention_norm")
            wide = self._norm(x, name + "ffn_norm")
            if self.shape.is_moe(layer):
                found = torch.stack([self._experts(row, name + "moe.") for row in wide])
            else:
                found = self._mlp(wide, name + "feed_forward.")
            x = x + self._after(found, name + "post_ffn_norm")
        head = "tok_embeddings" if self.shape.tied_embeddings else "output"
        logits = self._norm(x, "norm") @ self.values[f"{head}.weight"].T
        cap = self.shape.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _after(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._norm(x, name) if self.shape.post_norms else x

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, eps = self.values[f"{name}.weight"], self.shape.norm_eps
        if not self.shape.layer_norm:
            return _normed(x, weight, eps)
        return _normed(x - x.mean(-1, keepdim=True), weight, eps) + self.values[f"{name}.bias"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.values.get(f"{name}.bias", torch.tensor(0.0))
        return x @ self.values[f"{name}.weight"].T + bias

    def _attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        shape, size = self.shape, self.shape.head_dim
        parts = {part: self._linear(x, f"{name}w{part}") for part in "qkv"}
        found = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            query = parts["q"][:, head * size : (head + 1) * size]
            key = parts["k"][:, shared * size : (shared + 1) * size]
            value = parts["v"][:, shared * size : (shared + 1) * size]
            if shape.qk_norm:
                query, key = self._norm(query, f"{name}q_norm"), self._norm(key, f"{name}k_norm")
            if not shape.positions:
                query, key = _turned(query, shape.rope_theta), _turned(key, shape.rope_theta)
            sink = self.values[f"{name}sinks"][head] if shape.sinks else None
            found.append(_attended(query, key, value, shape.attention_cap or 0.0, sink))
        return self._linear(torch.cat(found, -1), f"{name}wo")

    def _latent(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """DeepSeek-V2's equations 37 to 47 (arXiv 2405.04434)."""
        shape, theta = self.shape, self.shape.rope_theta
        fixed = shape.head_dim - shape.qk_rope_head_dim
        queries = self._linear(x, f"{name}wq") if not shape.q_lora_rank else None
        if queries is None:
            few = self._norm(self._linear(x, f"{name}wq_a"), f"{name}q_norm")
            queries = self._linear(few, f"{name}wq_b")
        shared = self._linear(x, f"{name}wkv_a")
        few, turned = shared[:, : shape.kv_lora_rank], shared[:, shape.kv_lora_rank :]
        pairs = self._linear(self._norm(few, f"{name}kv_norm"), f"{name}wkv_b")
        found = []
        for head in range(shape.heads):
            query = queries[:, head * shape.head_dim : (head + 1) * shape.head_dim]
            pair = pairs[:, head * (fixed + shape.value_dim) :][:, : fixed + shape.value_dim]
            query = torch.cat((query[:, :fixed], _turned(query[:, fixed:], theta)), -1)
            key = torch.cat((pair[:, :fixed], _turned(turned, theta)), -1)
            found.append(_attended(query, key, pair[:, fixed:]))
        return self._linear(torch.cat(found, -1), f"{name}wo")

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        found = self._activated(self._linear(x, f"{name}w1"))
        if not self.shape.ungated:
            found = found * self._linear(x, f"{name}w3")
        return self._linear(found, f"{name}w2")

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if self.shape.activation == "silu":
            return x * torch.sigmoid(x)
        if self.shape.activation == "squared_relu":
            return x * x * (x > 0)
        return x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))

    def _experts(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """One token [D]."""
        scores = self._linear(x, f"{name}router").softmax(-1)
        best = scores.argsort(descending=True)[: self.shape.experts_per_token]
        total = torch.zeros_like(x)
        if self.shape.shared_ffn_dim:
            total = torch.sigmoid(self._linear(x, f"{name}shared_gate")) * self._mlp(
                x, f"{name}shared_experts."
            )
        for expert in best:

            def of(number: int, x: torch.Tensor, expert: torch.Tensor = expert) -> torch.Tensor:
                found = self.values[f"{name}experts.w{number}"][expert] @ x
                bias = self.values.get(f"{name}experts.b{number}")
                return found if bias is None else found + bias[expert]

            if self.shape.activation == "clipped_silu":
                gate = of(1, x).clamp(max=7)
                inner = gate * torch.sigmoid(1.702 * gate) * (of(3, x).clamp(-7, 7) + 1)
            else:
                inner = self._activated(of(1, x))
                inner = inner if self.shape.ungated else inner * of(3, x)
            share = scores[expert] / scores[best].sum()
            total = total + share * of(2, inner)
        return total


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_a_model_computed_by_hand(name: str) -> None:
    model = _restless(SHAPES[name])
    tokens = _tokens()
    expected = torch.stack([Reference(model).logits(sample) for sample in tokens])
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", ["dense", "experts", "latent", "gemma", "gpt", "squared", "gpt-oss"]
)
def test_gradients_are_those_of_a_model_computed_by_hand(name: str) -> None:
    model, tokens, targets = _restless(SHAPES[name]), _tokens(), _tokens(1)
    found = torch.autograd.grad(loss(model(tokens), targets), tuple(model.parameters()))
    by_hand = torch.stack([Reference(model).logits(sample) for sample in tokens])
    value = functional.cross_entropy(by_hand.flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(value, tuple(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("policy", ["full", "selective", "selective_op", "core_attention"])
def test_what_is_computed_again_gives_the_same_gradients(name: str, policy: str) -> None:
    model = Llama(SHAPES[name], sequence=LENGTH)
    tokens, targets = _tokens(), _tokens(1)

    def gradients() -> tuple[torch.Tensor, ...]:
        value = model.loss(model(tokens), targets)
        return torch.autograd.grad(value, tuple(model.parameters()))

    wanted = gradients()
    blocks = list(model.layers.values())
    with Treatment("cpu", policy).applied(model, blocks, range(len(blocks))):
        torch.testing.assert_close(gradients(), wanted)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SHAPES)
def test_training_learns_a_batch(name: str) -> None:
    model = Llama(SHAPES[name], sequence=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets = _tokens(), _tokens(1)
    values = []
    for _ in range(12):
        optimizer.zero_grad()
        value = model.loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[0] == pytest.approx(torch.log(torch.tensor(64.0)).item(), abs=0.1)
    assert values[-1] < 0.7 * values[0]


def test_dropout_is_of_training_alone_and_of_both_the_stream_and_attention() -> None:
    tokens = _tokens()
    for changes in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        model = _restless(msgspec.structs.replace(DENSE, **changes))
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        torch.testing.assert_close(model(tokens), _restless(DENSE)(tokens))


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("other", [parallel_loss, chunked_loss])
def test_every_kind_of_loss_has_the_same_value_and_gradients(other: Any, cap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, LENGTH, 8, generator=generator, requires_grad=True)
    weight = torch.randn(64, 8, generator=generator, requires_grad=True)
    targets = _tokens()
    expected = loss(capped(hidden @ weight.T, cap), targets)
    if other is chunked_loss:
        found = chunked_loss(hidden, weight, targets, 1, cap)
    else:
        found = parallel_loss(capped(hidden @ weight.T, cap), targets, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(3 * found, (hidden, weight)),
        torch.autograd.grad(3 * expected, (hidden, weight)),
    )


def _step(model: Llama) -> torch.Tensor:
    """Forward and backward of a rank's part; gives what it hands on."""
    shape, local = model.shape, model.local
    length = LENGTH // local.context
    dtype = next(model.parameters()).dtype
    if local.first:
        found = model(torch.zeros(BATCH, length, dtype=torch.int64))
    else:
        part = length // local.stream_degree
        found = model(torch.zeros(BATCH, part, shape.dim, dtype=dtype, requires_grad=True))
    if local.last:
        model.loss(found, torch.zeros(BATCH, length, dtype=torch.int64)).backward()
    else:
        found.backward(torch.empty_like(found))
    return found


def _checked(shape: LlamaShape, local: LocalShape, dtype: torch.dtype) -> torch.Tensor:
    with FakeTensorMode():
        model = Llama(shape, local, sequence=LENGTH, dtype=dtype)
        found = _step(model)
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DIVISIONS)
def test_a_rank_holds_the_tensors_of_its_local_shape_and_runs_without_data(
    name: str, dtype: torch.dtype
) -> None:
    found = _checked(FULL if name == "tensor" else DENSE, DIVISIONS[name], dtype)
    assert found.dtype == dtype


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name, local in DIVISIONS.items()
        for shape in (LATENT, AT_ONCE, GEMMA, DROPPED)
        if not (shape.is_moe(0) and local.layers) and not (shape is GEMMA and local.context > 1)
    ],
)
def test_a_rank_of_a_decoder_that_is_no_llama_runs_without_data(
    name: str, shape: LlamaShape
) -> None:
    _checked(shape, DIVISIONS[name], torch.bfloat16)


def test_no_sequence_is_longer_than_learned_positions() -> None:
    local = LocalShape(context=2)
    with pytest.raises(
        UnsupportedError, match=r"batch.sequence: expected at most the 16 posit.* 20"
    ):
        Llama(GPT, local, sequence=LENGTH)(_tokens(length=10))


def test_a_model_that_caps_scores_has_no_ranks_that_share_a_context() -> None:
    with pytest.raises(InputError, match=r"context: expected 1 for a model with caps or sinks"):
        check_local(GEMMA, DIVISIONS["context"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", EXPERT_DIVISIONS)
def test_a_rank_of_a_model_with_experts_runs_without_data(name: str) -> None:
    _checked(EXPERTS, EXPERT_DIVISIONS[name], torch.bfloat16)


def test_logits_are_gathered_unless_the_loss_is_parallel() -> None:
    assert _checked(DENSE, DIVISIONS["sequence"], torch.float32).shape == (BATCH, LENGTH, 64)
    assert _checked(DENSE, DIVISIONS["parallel loss"], torch.float32).shape == (BATCH, LENGTH, 32)
    assert _checked(DENSE, DIVISIONS["chunked loss"], torch.float32).shape == (BATCH, LENGTH, 32)


def test_a_stage_hands_on_its_part_of_the_stream() -> None:
    local = LocalShape(last=False, layers=(0, 1), tensor=2, sequence_parallel=True, context=2)
    assert _checked(DENSE, local, torch.float32).shape == (BATCH, LENGTH // 4, 32)


@pytest.mark.slow
def test_a_divided_model_runs_on_tensors_with_data_too() -> None:
    with torch.no_grad():
        for parameter in (model := Llama(EXPERTS, LocalShape(expert=2, tensor=2))).parameters():
            parameter.zero_()
    assert _step(model).shape == (BATCH, LENGTH, 64)


def test_an_undivided_model_calls_no_collective() -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        _step(Llama(EXPERTS, sequence=LENGTH))
    ours = {event.key for event in profile.key_averages() if "shardwright::" in event.key}
    assert ours == {"shardwright::grouped_product"}


def test_a_model_is_built_on_the_meta_device_and_started_later() -> None:
    model = Llama(FULL, sequence=LENGTH, device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.reset_parameters()
    torch.testing.assert_close(model(_tokens()), Llama(FULL, sequence=LENGTH)(_tokens()))


def test_layers_keep_their_number_on_a_later_stage() -> None:
    with torch.device("meta"):
        model = Llama(DENSE, LocalShape(first=False, layers=(1, 2)), device="meta")
    assert list(model.layers) == ["1"]


def test_any_part_of_a_tensor_starts_as_in_the_whole() -> None:
    model = Llama(DENSE, sequence=LENGTH)
    name = "layers.1.attention.wo.weight"
    part = model.initial_block(name, (3, 5), (4, 6))
    assert torch.equal(part, model.get_parameter(name)[3:7, 5:11])


def merged(model: Llama) -> Llama:
    """A llama without adapters whose matrices have them added."""
    plain = Llama(msgspec.structs.replace(model.shape, lora=msgspec.UNSET), sequence=LENGTH)
    state = model.state_dict()
    for name in [name for name in state if name.endswith(".lora_a.weight")]:
        layer = name.removesuffix(".lora_a.weight")
        low, high = state.pop(name), state.pop(f"{layer}.lora_b.weight")
        state[f"{layer}.weight"] = state[f"{layer}.weight"] + 2 * high @ low
    plain.load_state_dict(state)
    return plain


def test_adapters_begin_as_nothing_and_are_then_as_if_added_to_their_matrices() -> None:
    model, tokens = Llama(ADAPTED, sequence=LENGTH), torch.randint(64, (BATCH, LENGTH))
    base = Llama(FULL, sequence=LENGTH)
    base.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(tokens), base(tokens))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    found = model(tokens)
    torch.testing.assert_close(found, merged(model)(tokens))
    assert not torch.allclose(found, base(tokens))


@pytest.mark.parametrize("kind", ["gathered", "chunked"])
def test_a_loss_has_gradients_of_adapters_alone(kind: Any) -> None:
    model = Llama(ADAPTED, LocalShape(loss=kind), sequence=LENGTH)
    model.store_frozen(torch.float64)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {d for n, d in dtypes.items() if "lora_" in n} == {torch.float32}
    assert {d for n, d in dtypes.items() if "lora_" not in n} == {torch.float64}
    model.double()
    tokens, targets = torch.randint(64, (2, BATCH, LENGTH))
    model.loss(model(tokens), targets).backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n in dtypes if "lora_" in n
    }


def test_a_loss_of_halves_is_computed_in_fp32() -> None:
    logits, targets = torch.randn(BATCH, LENGTH, 64).bfloat16(), torch.randint(64, (BATCH, LENGTH))
    assert next_token_loss(logits, targets).equal(loss(logits, targets))
    assert next_token_loss(logits, targets).dtype == torch.float32


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any) -> Any:
    """Causal attention of scores beside which each head's sink stands, operator by operator."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    beside = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1] @ value


def test_a_sink_takes_its_share_of_what_a_token_looks_at() -> None:
    core = Llama(OSS, sequence=LENGTH).layers["0"].attention.inner_attention
    parts = [torch.randn(BATCH, 4, LENGTH, 8, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(4, requires_grad=True)
    slope = torch.randn(BATCH, 4, LENGTH, 8)
    found, wanted = core(*parts, sinks), attended(*parts, sinks)
    torch.testing.assert_close(found, wanted)
    every = [*parts, sinks]
    torch.testing.assert_close(
        torch.autograd.grad(found, every, slope), torch.autograd.grad(wanted, every, slope)
    )


def test_experts_have_biases_and_a_clipped_gate() -> None:
    experts = Llama(OSS, sequence=LENGTH).layers["0"].moe.experts
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    rows, ends = torch.randn(10, 32), torch.tensor([3, 3, 9, 10])
    found = experts(rows, ends)
    for expert, (start, stop) in enumerate([(0, 3), (3, 3), (3, 9), (9, 10)]):
        part = rows[start:stop]
        gate = (part @ experts.w1[expert].T + experts.b1[expert]).clamp(max=7.0)
        up = (part @ experts.w3[expert].T + experts.b3[expert]).clamp(-7.0, 7.0)
        inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        wanted = inner @ experts.w2[expert].T + experts.b2[expert]
        torch.testing.assert_close(found[start:stop], wanted)
