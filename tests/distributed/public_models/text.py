"""Language models: GPT-2, BERT, Llama, T5, Mixtral, Mamba, an LSTM."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .parts import Attention, Batch, Output, RMSNorm, next_token_loss

VOCABULARY, WIDTH, LENGTH = 37, 12, 7


def words(generator: torch.Generator) -> Batch:
    """[2, 7] ids, which are their own labels."""
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2 has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(3 * WIDTH, WIDTH)})
        self.attn["c_proj"] = Conv1D(WIDTH, WIDTH)
        self.mlp = nn.Sequential(Conv1D(4 * WIDTH, WIDTH), nn.GELU(), Conv1D(WIDTH, 4 * WIDTH))

    def forward(self, hidden_states: torch.Tensor, use_cache: bool = False) -> Any:
        qkv = self.attn["c_attn"](self.ln_1(hidden_states))
        query, key, value = (
            part.unflatten(-1, (3, -1)).transpose(1, 2) for part in qkv.split(WIDTH, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_states = hidden_states + self.attn["c_proj"](mixed.transpose(1, 2).flatten(-2))
        hidden_states = hidden_states + self.mlp(self.ln_2(hidden_states))
        return (hidden_states, (key, value) if use_cache else None)


class GPT2(nn.Module):
    units = (GPT2Block,)
    batch = staticmethod(words)

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GPT2Block() for _ in range(3))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        positions = torch.arange(input_ids.shape[1])
        hidden_states = self.wte(input_ids) + self.wpe(positions)
        for block in self.h:
            hidden_states, _ = block(hidden_states, use_cache=labels is None)
        logits = self.lm_head(self.ln_f(hidden_states))
        return Output(loss=next_token_loss(logits, labels), logits=logits)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, heads=3)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.intermediate = nn.Linear(WIDTH, 30)
        self.output = nn.Linear(30, WIDTH)
        self.output_norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x, mask=attention_mask))
        out: torch.Tensor = self.output_norm(x + self.output(F.gelu(self.intermediate(x))))
        return out


class Bert(nn.Module):
    """Masked words and the next sentence; the decoder has the words' weight and its own bias."""

    units = (BertLayer,)

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position, self.kind = nn.Embedding(LENGTH, WIDTH), nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)
        self.encoder = nn.ModuleList(BertLayer() for _ in range(2))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.word.weight
        self.relationship = nn.Linear(WIDTH, 2)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
        mask = torch.ones(3, LENGTH, dtype=torch.bool)
        mask[1, 4:] = mask[2, 6:] = False
        labels = ids.masked_fill(torch.rand(3, LENGTH, generator=generator) < 0.5, -100)
        next_is = torch.randint(2, (3,), generator=generator)
        return {
            "input_ids": ids * mask,
            "token_type_ids": (ids % 2) * mask,
            "attention_mask": mask,
            "labels": labels.masked_fill(~mask, -100),
            "next_sentence_label": next_is,
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        next_sentence_label: torch.Tensor,
    ) -> Output:
        x = self.word(input_ids) + self.kind(token_type_ids) + self.position(self.position_ids)
        x = self.norm(x)
        for layer in self.encoder:
            x = layer(x, attention_mask=attention_mask[:, None, None])
        logits = self.decoder(self.transform(x))
        pair = self.relationship(self.pooler(x[:, 0]).tanh())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=loss + F.cross_entropy(pair, next_sentence_label), logits=logits)


class LlamaDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.self_attn = Attention(WIDTH, heads=3, key_heads=1, bias=False)
        self.gate_proj = nn.Linear(WIDTH, 20, bias=False)
        self.up_proj = nn.Linear(WIDTH, 20, bias=False)
        self.down_proj = nn.Linear(20, WIDTH, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor]:
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), rotary=position_embeddings, causal=True)
        y = self.post_attention_layernorm(x)
        return (x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)),)


class Llama(nn.Module):
    units = (LlamaDecoderLayer,)
    batch = staticmethod(words)

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(LlamaDecoderLayer() for _ in range(3))
        self.model.norm = RMSNorm(WIDTH)
        inverse = 100.0 ** (-torch.arange(0, 4, 2) / 4)
        self.register_buffer("inv_freq", inverse, persistent=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        x = self.model.embed_tokens(input_ids)
        angles = torch.arange(LENGTH)[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        for layer in self.model.layers:
            (x,) = layer(x, position_embeddings=(angles.cos(), angles.sin()))
        logits = self.lm_head(self.model.norm(x))
        return {"loss": next_token_loss(logits, labels), "logits": logits}


class T5Block(nn.Module):
    """Only the first block of a stack has the distances' bias; it is handed to the others."""

    def __init__(self, decodes: bool, first: bool) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(WIDTH), Attention(WIDTH, heads=2, bias=False)
        self.distances = nn.Embedding(2 * LENGTH, 2) if first else None
        self.cross_norm = RMSNorm(WIDTH) if decodes else None
        self.cross = Attention(WIDTH, heads=2, bias=False) if decodes else None
        self.last_norm = RMSNorm(WIDTH)
        self.wi, self.wo = nn.Linear(WIDTH, 18, bias=False), nn.Linear(18, WIDTH, bias=False)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            assert self.distances is not None
            positions = torch.arange(x.shape[1])
            away = positions[None] - positions[:, None] + LENGTH
            bias = self.distances(away).permute(2, 0, 1)[None]
            if self.cross is not None:
                bias = bias.masked_fill(away > LENGTH, -1e9)
        x = x + self.attention(self.norm(x), mask=bias)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.wo(F.relu(self.wi(self.last_norm(x)))), bias


class T5Stack(nn.Module):
    def __init__(self, embed_tokens: nn.Embedding, decodes: bool) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(T5Block(decodes, number == 0) for number in range(2))
        self.final_layer_norm = RMSNorm(WIDTH)

    def forward(self, ids: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x, bias = self.embed_tokens(ids), None
        for block in self.block:
            x, bias = block(x, memory, bias)
        out: torch.Tensor = self.final_layer_norm(x)
        return out


class T5(nn.Module):
    """One embedding for the encoder, the decoder and the head."""

    units = (T5Block,)

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = T5Stack(self.shared, decodes=False)
        self.decoder = T5Stack(self.shared, decodes=True)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        return {"input_ids": ids, "labels": torch.randint(VOCABULARY, (2, 5), generator=generator)}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        memory = self.encoder(input_ids)
        states = self.decoder(F.pad(labels, (1, 0))[:, :-1], memory)
        logits = F.linear(states * WIDTH**-0.5, self.shared.weight)
        return Output(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


class MixtralLayer(nn.Module):
    """Two of five experts a word; which of them get any words differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expert_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention = Attention(WIDTH, heads=3, key_heads=3, bias=False)
        self.gate = nn.Linear(WIDTH, 5, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.SiLU(), nn.Linear(8, WIDTH))
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm(x), causal=True)
        flat = self.expert_norm(x).flatten(0, 1)
        router = self.gate(flat)
        shares, chosen = router.softmax(-1).topk(2)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]) * shares[rows, place, None])
        return x + out.view_as(x), router


class Mixtral(nn.Module):
    units = (MixtralLayer,)
    batch = staticmethod(words)

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MixtralLayer() for _ in range(2))
        self.norm, self.lm_head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x, routers = self.embed_tokens(input_ids), []
        for layer in self.layers:
            x, router = layer(x)
            routers.append(router.softmax(-1))
        logits = self.lm_head(self.norm(x))
        balance = sum(router.mean(0).square().sum() for router in routers)
        return Output(loss=next_token_loss(logits, labels) + 0.1 * balance, logits=logits)


class MambaBlock(nn.Module):
    def __init__(self, states: int = 4, inner: int = 20) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.in_proj = nn.Linear(WIDTH, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.x_proj = nn.Linear(inner, 1 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(1, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, WIDTH, bias=False)
        self.states = states

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(self.norm(residual)).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2))
        step, enters, leaves = self.x_proj(x).split((1, self.states, self.states), dim=-1)
        step = F.softplus(self.dt_proj(step))
        decay = torch.exp(step[..., None] * -self.A_log.exp())
        state, outs = torch.zeros_like(decay[:, 0]), []
        for time in range(LENGTH):
            entered = (step[:, time] * x[:, time])[..., None] * enters[:, time, None]
            state = decay[:, time] * state + entered
            outs.append((state * leaves[:, time, None]).sum(-1))
        y = torch.stack(outs, dim=1) + self.D * x
        out: torch.Tensor = residual + self.out_proj(y * F.silu(gate))
        return out


class Mamba(nn.Module):
    units = (MambaBlock,)
    batch = staticmethod(words)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"embeddings": nn.Embedding(VOCABULARY, WIDTH)})
        self.backbone["layers"] = nn.ModuleList(MambaBlock() for _ in range(2))
        self.backbone["norm_f"] = RMSNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.backbone["embeddings"](input_ids)
        for layer in self.backbone["layers"]:
            x = layer(x)
        logits = self.backbone["norm_f"](x) @ self.backbone["embeddings"].weight.T
        return Output(loss=next_token_loss(logits, labels), logits=logits)


class LSTM(nn.Module):
    """Two layers, both ways, over packed sequences of unequal length; classifies."""

    units = (nn.LSTM, nn.Embedding)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, 9, num_layers=2, bidirectional=True, batch_first=True)
        self.attention = nn.Parameter(torch.full((18,), 1 / math.sqrt(18)))
        self.classifier = nn.Linear(18, 3)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        lengths = torch.tensor([7, 5, 2])
        ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
        labels = torch.randint(3, (3,), generator=generator)
        kept = torch.arange(LENGTH) < lengths[:, None]
        return {"input_ids": ids * kept, "lengths": lengths, "labels": labels}

    def forward(
        self, input_ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor
    ) -> Output:
        packed = pack_padded_sequence(self.embedding(input_ids), lengths, batch_first=True)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        weights = (states @ self.attention).softmax(-1)
        logits = self.classifier((states * weights[..., None]).sum(1))
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)
