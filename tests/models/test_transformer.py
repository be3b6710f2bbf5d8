from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardwright.job.job import Job, parse_job
from shardwright.models.transformer import Transformer, next_token_loss


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


def test_the_feed_forward_is_four_times_as_wide_unless_it_is_given() -> None:
    for ffn_dim, width in ((None, 24), (5, 5)):
        widths = {} if ffn_dim is None else {"ffn_dim": ffn_dim}
        block = Transformer(_job(dim=6, **widths), "meta").layers[1]
        assert (block.up.weight.shape, block.down.weight.shape) == ((width, 6), (6, width))


def test_nothing_is_a_buffer(model: Transformer) -> None:
    assert not list(model.buffers())


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


def test_a_model_on_the_meta_device_has_its_starting_values(model: Transformer) -> None:
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
