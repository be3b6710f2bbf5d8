"""Bytes of optimizers: what torch's own keep and take, measured, and arithmetic for the others."""

from __future__ import annotations

import dataclasses
import importlib
import weakref
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.optimizers import DENSE, OPTIMIZERS, Optimizer, optimizer_named
from shardwright.core.tensor import TensorSpec
from shardwright.core.timeline import StorageChange
from shardwright.heap.rank_step import Place, StateTensor, states, step_temporaries

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = ((64, 32), (128, 16), (300,), (40, 40), (3, 5, 7), (), (9,))
MIXED = ("fp32", "bf16", "fp32", "bf16", "bf16", "fp32", "bf16")
OPTIONS = {"for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd_momentum", {}),
    ("sgd_momentum", {"weight_decay": 0.1}),
    ("sgd_momentum", {"weight_decay": 0.1, "nesterov": True}),
    ("adam", {}),
    ("adam", {"weight_decay": 0.1}),
    ("adamw", {}),
    ("adamw", {"amsgrad": True, "weight_decay": 0.1}),
    ("adagrad", {}),
    ("adagrad", {"weight_decay": 0.1}),
    ("adafactor", {}),
]


def state_bytes(optimizer: Optimizer, tensor: TensorSpec, place: Place = "device") -> int:
    """Bytes that are kept for ``tensor`` in one place."""
    return sum(each.bytes for each in states(optimizer, tensor) if each.place == place)


def peak_bytes(changes: Iterable[StorageChange]) -> int:
    """The most that is alive at once."""
    return max(accumulate((change.bytes for change in changes), initial=0))


class _Live(TorchDispatchMode):
    """Bytes of the storages that are made inside, and their highest sum."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {each.untyped_storage()._cdata for each in known}

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def _specs(dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> list[TensorSpec]:
    return [
        TensorSpec(f"layer{k}.weight", shape, dtype)
        for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


def _measured(
    row: Optimizer, options: dict[str, Any], specs: list[TensorSpec]
) -> tuple[list[int], int]:
    """Bytes of the states of every tensor, and the peak of what a steady step takes."""
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(spec.shape).to(DTYPES[spec.dtype])) for spec in specs
    ]
    module, _, name = row.make.partition(":")
    cls = getattr(importlib.import_module(module), name)
    optimizer = cls(parameters, lr=0.01, **row.settings, **options)
    for _ in range(2):
        for each in parameters:
            each.grad = torch.randn_like(each)
        optimizer.step()
    kept = [[t for t in optimizer.state[p].values() if torch.is_tensor(t)] for p in parameters]
    known = [*parameters, *(p.grad for p in parameters), *(t for its in kept for t in its)]
    with _Live(known) as live:
        optimizer.step()
    assert live.now == 0
    return [sum(t.untyped_storage().nbytes() for t in its) for its in kept], live.peak


@pytest.mark.parametrize("dtypes", [("fp32",) * 7, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    ("name", "options", "implementation"),
    [
        (*case, implementation)
        for case in CASES
        for implementation in OPTIONS
        if (case[0], implementation) != ("adafactor", "fused")
    ],
)
def test_states_and_temporaries_are_those_of_torch(
    name: str, options: dict[str, Any], dtypes: tuple[str, ...], implementation: str
) -> None:
    specs = _specs(dtypes, SHAPES)
    row = optimizer_named(name, implementation)
    row = dataclasses.replace(row, settings={**row.settings, **options})
    kept, peak = _measured(row, OPTIONS[implementation], specs)
    assert [sum(state.bytes for state in states(row, spec)) for spec in specs] == kept
    assert peak_bytes(step_temporaries(row, specs)) == peak


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("most", [4096, 2**16 + 1000])
def test_8_bits_keep_and_take_what_ours_does(dtype: str, most: int) -> None:
    specs = _specs((dtype,) * 5, ((64, 65), (most,), (4095,), (7, 3), ()))
    rule = optimizer_named("adamw_8bit")
    kept, peak = _measured(rule, {}, specs)
    assert [state_bytes(rule, spec) for spec in specs] == kept
    assert kept[0] == 2 * (64 * 65 + 4 * 17) + 4
    assert peak_bytes(step_temporaries(rule, specs)) == peak


def test_a_chunk_of_8_bits_is_longer_on_an_accelerator() -> None:
    rule, spec = optimizer_named("adamw_8bit"), TensorSpec("w", (2**23,))
    host, device = (
        peak_bytes(step_temporaries(rule, [spec], on_gpu=on_gpu)) for on_gpu in (False, True)
    )
    assert 63 * host < device < 64 * host < 80e6


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_muon_keeps_and_takes_what_torchs_does(dtype: str) -> None:
    specs = _specs((dtype,) * 3, ((64, 32), (32, 128), (40, 40)))
    rule = optimizer_named("muon")
    kept, peak = _measured(rule, {}, specs)
    assert [state_bytes(rule, spec) for spec in specs] == kept
    assert peak_bytes(step_temporaries(rule, specs)) == peak


@pytest.mark.parametrize("fqn", ["tok_embeddings.weight", "lm_head.weight", "output.weight"])
def test_muon_leaves_embedding_and_output_layer_to_adamw(fqn: str) -> None:
    spec = TensorSpec(fqn, (100, 10))
    names = [state.name for state in states(optimizer_named("muon"), spec)]
    assert names == ["step", "exp_avg", "exp_avg_sq"]


def test_muon_leaves_what_is_no_matrix_to_adamw() -> None:
    assert state_bytes(optimizer_named("muon"), TensorSpec("norm.weight", (10,))) == 2 * 4 * 10


def test_muons_step_takes_what_its_part_or_adamws_takes_whichever_is_more() -> None:
    matrix, embedding = TensorSpec("w.weight", (8, 8)), TensorSpec("embed.weight", (1000, 8))
    rule = optimizer_named("muon")
    both = peak_bytes(step_temporaries(rule, [matrix, embedding]))
    assert both == peak_bytes(step_temporaries(rule, [embedding])) == 4 * 8000


def test_step_counters_live_on_the_host_unless_the_step_is_fused() -> None:
    spec = TensorSpec("w", (4,))
    assert StateTensor("step", 4, "host") in states(optimizer_named("adamw"), spec)
    assert StateTensor("step", 4, "device") in states(optimizer_named("adamw", "fused"), spec)


def test_adamw_with_bf16_states_keeps_four_bytes_per_parameter() -> None:
    assert state_bytes(optimizer_named("adamw_bf16"), TensorSpec("w", (1000,))) == 4000


def test_torchaos_8bit_adam_keeps_codes_scales_and_a_map_of_its_own_per_state() -> None:
    numel = 64 * 256
    each = numel + numel // 256 * 4 + 256 * 4
    assert (
        state_bytes(optimizer_named("adamw_8bit_torchao"), TensorSpec("w", (64, 256))) == 2 * each
    )


@pytest.mark.parametrize("shape", [(4095,), (17, 256), (257, 17)], ids=["few", "4352", "uneven"])
def test_torchao_quantizes_large_tensors_of_whole_blocks_only(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", shape, "bf16")
    quantized = spec.numel >= 4096 and spec.numel % 256 == 0
    names = {state.name for state in states(optimizer_named("adamw_8bit_torchao"), spec)}
    assert ("exp_avg_scale" in names) == quantized
    if not quantized:
        assert state_bytes(optimizer_named("adamw_8bit_torchao"), spec) == 2 * 2 * spec.numel


def test_bitsandbytes_keeps_small_tensors_in_fp32_and_shares_its_maps() -> None:
    rule = optimizer_named("adamw_8bit_bitsandbytes")
    assert state_bytes(rule, TensorSpec("w", (4095,), "bf16")) == 2 * 4 * 4095
    assert state_bytes(rule, TensorSpec("w", (4097,), "bf16")) == 2 * (4097 + 17 * 4)
    assert rule.shared_bytes == 2 * 1024


def test_offloaded_states_take_nothing_on_the_device() -> None:
    rule = optimizer_named("adamw", offload=True)
    spec = TensorSpec("w", (1000,), "bf16")
    assert state_bytes(rule, spec) == 0
    assert state_bytes(rule, spec, "host") == 4 + 4 * 1000
    assert step_temporaries(rule, [spec]) == ()


@pytest.mark.parametrize("name", DENSE)
def test_a_step_frees_what_it_takes(name: str) -> None:
    alive: set[str] = set()
    for change in step_temporaries(optimizer_named(name), _specs(MIXED, SHAPES)):
        assert (change.storage in alive) == (change.bytes < 0) or change.bytes == 0
        alive.symmetric_difference_update({change.storage})
    assert alive == set()


def test_a_loop_over_tensors_holds_the_last_denominator_while_it_makes_the_next() -> None:
    specs = [TensorSpec("a", (10,)), TensorSpec("b", (10,))]
    taken = step_temporaries(optimizer_named("adam", "for_loop"), specs)
    assert [change.bytes for change in taken] == [40, 40, -40, 40, 40, -40, -40, -40]
    assert peak_bytes(taken) == 120
    assert taken[0] == StorageChange("root.1", 40)


def test_an_optimizer_shows_what_is_assumed_about_it() -> None:
    assert OPTIMIZERS["adam"].assumptions() == ()
    assert "AdamW the rest" in optimizer_named("muon").assumptions()[0]
    assert "compiled" in optimizer_named("adamw_8bit_torchao").assumptions()[0]
    assert optimizer_named("adamw_8bit").assumptions() == ()


def test_beside_other_runtimes_8_bits_are_torchaos() -> None:
    found = optimizer_named("adamw_8bit", offload=True).beside_others
    assert (found.name, found.offload) == ("adamw_8bit_torchao", True)
    text = "adamw_8bit is adamw_8bit_torchao: ours updates units of our own runtime; the compiled"
    assert found.assumptions()[0].startswith(text)
    assert optimizer_named("adamw").beside_others.name == "adamw"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("lion",), InputError, r"train\.optimizer: expected one of sgd, .*'lion'"),
        (("adam", "quick"), UnsupportedError, "one that adam has: foreach, .*, got 'quick'"),
        (("muon", "fused"), UnsupportedError, "one that muon has: .*, got 'fused'"),
        (("adamw_8bit", "foreach"), UnsupportedError, "one that adamw_8bit has: fused, got"),
    ],
)
def test_an_optimizer_that_does_not_exist_is_refused(
    arguments: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        optimizer_named(*arguments)
