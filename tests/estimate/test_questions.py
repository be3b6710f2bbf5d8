"""Questions of one line from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.cli.main import main
from shardwright.core.errors import InputError

ASKED = ["--runtime", "fsdp2", "--checkpointing", "full"]
KEYS = {"runtime": "fsdp2", "checkpointing": "full"}


def test_memory_of_a_name_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = sw.memory("llama3.2-1b", on="8xH100", seq=1024, **KEYS)
    assert main(["memory", "llama3.2-1b", "--on", "8xH100", "--seq", "1024", *ASKED]) == 0
    printed = capsys.readouterr()
    assert str(found).split() == printed.out.split()
    assert "model.hf_config=llama3.2-1b batch.size=1 batch.sequence=1024" in printed.err
    assert found.fits
    assert found.settings["param_dtype"] == "bf16"
    assert next(iter(found.settings)) == "param_dtype"
    html = found._repr_html_()
    assert "<svg" in html
    assert "<table>" in html


def test_a_fit_and_advice_are_asked_alike_and_show_themselves() -> None:
    fitting = sw.fit("llama3.2-1b", on="1xRTX4090", seq=512, **KEYS)
    assert not fitting.fits
    assert "computing in bf16 and reducing in fp32" in " ".join(str(fitting).split())
    assert "<table>" in fitting._repr_html_()
    assert repr(fitting) == "<Fit of llama3.2-1b on 1 rank: batch 1 does not fit, largest 0>"


def test_keys_of_a_job_and_the_fields_of_an_advice_are_taken(tmp_path: Path) -> None:
    fixed = {"tensor": "2", "checkpointing": "full"}
    found = sw.advise("llama3.2-1b", on="2xH100", seq=512, fixed=fixed, runtime="fsdp2")
    assert found.fits
    assert found.answer is not None
    assert found.answer.layout.tensor == 2
    assert repr(found).startswith("<Advice for llama3.2-1b on 2 ranks: tensor 2, ")
    assert "<svg" in found._repr_html_()
    chunked = sw.memory("llama3.2-1b", on="2xH100", seq=512, **KEYS, **{"memory.loss": "chunked"})
    assert chunked.settings["loss"] == "chunked"


@pytest.mark.parametrize(
    ("model", "keys", "said"),
    [
        ("llama3.2-1b", {"sequence": 8}, "sequence: expected one of batch, seq, "),
        ("llama3.2-1b", {"checkpoint": "full"}, "Did you mean 'checkpointing'?"),
        ("lama3.2-1b", {}, "Did you mean 'llama3.2-1b'?"),
        (3, {}, "model: expected a Job, its file or a model's name, got int."),
        (sw.parse_job({"model": {"kind": "llama"}}), {"seq": 8}, "expected nothing beside a Job"),
    ],
)
def test_what_is_asked_wrongly_is_named(model: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(sw.InputError) as refused:
        sw.memory(model, **keys)
    assert said in str(refused.value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        self.head = nn.Linear(64, 8)
        self.head.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).relu())


def test_a_module_at_hand_is_estimated_and_stays_as_it_is() -> None:
    net, inputs = Net(), torch.ones(32, 64)
    before = {name: (id(p), p.clone()) for name, p in net.named_parameters()}
    found = sw.estimate_memory(net, inputs, optimizer="adam")
    numbers = 4 * 64 * 64 + 64 * 8 + 8
    assert (found.parameters, found.world_size, found.fits) == (numbers, 1, True)
    states = found.worst.by_category["optimizer_state"]
    assert 2 * 4 * numbers < states < 2 * 4 * numbers + 64  # and the number of its step
    for name, parameter in net.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    halves = sw.estimate_memory(Net, inputs, optimizer="sgd", on="2xH100", loss=torch.sum)
    assert halves.world_size == 2
    assert "optimizer_state" not in halves.worst.by_category


def test_a_module_at_hand_with_keys_that_no_plan_follows_is_refused() -> None:
    with pytest.raises(sw.UnsupportedError) as refused:
        sw.estimate_memory(Net(), torch.ones(2, 64), memory={"runtime": "fsdp2"})
    assert str(refused.value) == (
        "estimate_memory: memory.runtime: expected 'shardwright' for a module at hand, got "
        "'fsdp2'. sw.memory('package.module:function') takes it, of a function that makes the "
        "module."
    )


@pytest.mark.parametrize(
    ("of", "keys", "said"),
    [
        (
            Net(),
            {"optimizer": "adamm"},
            "estimate_memory: optimizer: expected one of sgd, .*'adam'",
        ),
        (Net(), {"optimizer": "muon"}, "estimate_memory: optimizer: expected one of .* at hand"),
        (Net(), {"checkpointing": "ful"}, "estimate_memory: checkpointing: .*Did you mean 'full'"),
        (Net(), {"memory": {"zero": 7}}, "estimate_memory: memory.zero: expected one of 1"),
        (Net(), {"check": "full"}, "estimate_memory: check: .*Did you mean 'checkpointing'"),
        (Net(), {"loss": 3}, "module Net: expected a function of the result as loss"),
        (Net(), {"on": "H100x8"}, "on: expected a machine such as 8xH100.*Did you mean '8xH100'"),
        (nn.Linear, {}, "module: expected a function that takes nothing.*in_features"),
        ("llama3-8b", {}, "a Job, or a module and its inputs, got str.*sw.memory takes names"),
    ],
)
def test_a_module_s_mistakes_are_said_in_the_words_of_the_call(
    of: Any, keys: dict[str, Any], said: str
) -> None:
    inputs = None if isinstance(of, str) else torch.ones(2, 64)
    with pytest.raises(sw.ShardwrightError, match=said) as refused:
        sw.estimate_memory(of, inputs, **keys)
    assert "model.python" not in str(refused.value)


def test_short_keys_of_a_job_are_taken_for_a_module_at_hand() -> None:
    found = sw.estimate_memory(Net(), torch.ones(2, 64), on="2xH100", dtype="bf16", zero=2)
    assert (found.settings["param_dtype"], found.settings["zero"]) == ("bf16", "2")


def test_what_a_program_mistakes_is_said_in_a_line() -> None:
    with pytest.raises(InputError, match=r"on: expected a machine in a word.*got 8\."):
        sw.fit("llama3-8b", on=8)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="inputs: expected what the module is called with"):
        sw.estimate_memory(torch.nn.Linear(2, 2), on="1xH100")
