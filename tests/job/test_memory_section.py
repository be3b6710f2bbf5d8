from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from shardwright.core.errors import InputError
from shardwright.core.placement import Zero
from shardwright.cost.presets import HARDWARE
from shardwright.job.cluster import ClusterSection, device_of
from shardwright.job.job import parse_job
from shardwright.job.memory import (
    Fsdp2Section,
    MemorySection,
    Offload,
    Runtime,
    float8_scaling,
)
from shardwright.job.model_of_job import step_dtypes


def _checked(section: MemorySection, kind: str = "llama") -> None:
    """Read a job with the section."""
    parse_job({"model": {"kind": kind}, "memory": msgspec.to_builtins(section)})


@pytest.mark.parametrize(
    "name", ["none", "full", "selective", "core_attention", "layers:2", "save:aten.mm"]
)
def test_checkpointing_goes_by_name(name: str) -> None:
    _checked(MemorySection(checkpointing=name))


@pytest.mark.parametrize("name", ["some", "layers:", "layers:0", "layers:-1", "save:", "full "])
def test_an_unknown_checkpointing_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError) as caught:
        _checked(MemorySection(checkpointing=name))
    assert str(caught.value).startswith("job: memory.checkpointing: expected one of none, full, ")
    assert f"got {name!r}." in str(caught.value)


def test_fsdp2_shares_everything() -> None:
    with pytest.raises(InputError) as caught:
        _checked(MemorySection(runtime="fsdp2", zero=1))
    assert str(caught.value) == (
        "job: memory.zero: expected nothing beside runtime = 'fsdp2', got 1. Optimizer states "
        "alone are shared by memory.runtime = 'shardwright', or 'ddp' with "
        "torch.distributed.optim.ZeroRedundancyOptimizer."
    )


@pytest.mark.parametrize("runtime", ["fsdp2", "ddp", "megatron"])
def test_zero_2_is_what_our_runtime_does(runtime: Runtime) -> None:
    _checked(MemorySection(zero=2))
    with pytest.raises(InputError, match=r"got 2\. memory.runtime = 'shardwright' shares"):
        _checked(MemorySection(runtime=runtime, zero=2))


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_that_stay_whole_are_not_freed(zero: Zero) -> None:
    _checked(MemorySection(zero=zero, reshard_after_forward=False))
    with pytest.raises(InputError, match=f"false or nothing beside zero = {zero}, which keeps"):
        _checked(MemorySection(zero=zero, reshard_after_forward=True))


@pytest.mark.parametrize(
    ("runtime", "ways"),
    [
        ("shardwright", ("none", "all", "auto")),
        ("fsdp2", ("none", "states", "all")),
        ("ddp", ("none", "states")),
        ("megatron", ("none", "states")),
    ],
)
def test_a_runtime_has_on_the_host_what_it_can(runtime: Runtime, ways: tuple[Offload, ...]) -> None:
    for way in get_args(Offload):
        section = MemorySection(runtime=runtime, offload=way)
        if way in ways:
            _checked(section)
        else:
            with pytest.raises(InputError, match=r"memory\.offload: expected 'none' or '"):
                _checked(section)


def test_what_is_left_to_a_plan_is_not_estimated_without_one() -> None:
    assert MemorySection(offload="all").on_host
    assert not MemorySection(offload="none").on_host
    with pytest.raises(InputError, match=r"offload: expected 'none' or 'all' where no plan"):
        MemorySection(offload="auto").on_host  # noqa: B018


def test_eight_bit_products_have_one_scale_per_tensor_unless_rows_are_named() -> None:
    assert float8_scaling(MemorySection()) is None
    assert float8_scaling(MemorySection(float8=True)) == "tensorwise"
    assert float8_scaling(MemorySection(float8="rowwise")) == "rowwise"


# Keys of [memory] that name no dtype, one at a time.
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "none"},
    {"lowering": "cpu"},
    {"zero": 2},
    {"offload": "all"},
    {"runtime": "fsdp2"},
    {"loss": "chunked"},
)


@pytest.mark.parametrize(
    ("model", "device", "dtypes"),
    [
        ({"kind": "llama"}, "cuda", ("bf16", "fp32")),
        ({"kind": "llama"}, "cpu", ("fp32", "fp32")),
        ({"kind": "python", "python": "mine:net"}, "cuda", ("", "")),
    ],
)
def test_no_key_but_a_dtype_s_own_changes_the_dtypes(
    model: dict[str, Any], device: str, dtypes: tuple[str, str]
) -> None:
    cluster = {"compute_device": device, "world_size": 2}
    alone = parse_job({"model": model, "cluster": cluster})
    assert step_dtypes(alone) == dtypes
    for keys in OTHERS:
        job = parse_job({"model": model, "cluster": cluster, "memory": keys})
        assert step_dtypes(job) == dtypes, keys
    named = {"model": model, "cluster": cluster, "memory": {"param_dtype": "fp16"}}
    assert step_dtypes(parse_job(named)) == ("fp16", "fp32")


def test_the_device_of_a_preset_is_known_without_its_constants() -> None:
    for name, preset in HARDWARE.items():
        assert device_of(ClusterSection(preset=name)) == preset.compute_device
    assert device_of(ClusterSection()) == "cpu"
    assert device_of(ClusterSection(preset="local", compute_device="cuda")) == "cuda"


def test_settings_that_mean_nothing_beside_others_are_refused() -> None:
    section = MemorySection(fsdp2=Fsdp2Section(reduce_scatter_max_input_buffers=2))
    _checked(msgspec.structs.replace(section, runtime="fsdp2"))
    with pytest.raises(InputError, match=r"memory\.fsdp2: expected nothing beside runtime = 'ddp'"):
        _checked(msgspec.structs.replace(section, runtime="ddp"))
    _checked(MemorySection(fp32_logits=True))
    with pytest.raises(InputError, match=r"memory\.fp32_logits: expected false or nothing beside"):
        _checked(MemorySection(fp32_logits=True, loss="chunked"))
    kernels: dict[str, Any] = {"attention": "eager", "rms_norm": "composite"}
    for key, value in kernels.items():
        _checked(MemorySection(runtime="fsdp2", **{key: value}))
        said = rf"memory\.{key}: expected nothing beside runtime = 'megatron'.*memory\.megatron\."
        with pytest.raises(InputError, match=said):
            _checked(MemorySection(runtime="megatron", **{key: value}))


def test_what_is_so_anyway_is_as_if_nobody_had_said_it() -> None:
    given = MemorySection(fp32_logits=False, fsdp2=Fsdp2Section())
    assert given.bare == MemorySection()
    _checked(given, "transformer")
    with pytest.raises(InputError, match=r"memory\.fp32_logits"):
        _checked(MemorySection(fp32_logits=True), "transformer")
