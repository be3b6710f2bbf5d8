from __future__ import annotations

import pytest

from shardwright.core.errors import InputError
from shardwright.core.memory_section import (
    MemorySection,
    Runtime,
    check_memory,
    float8_scaling,
)


@pytest.mark.parametrize(
    "name", ["none", "full", "selective", "core_attention", "layers:2", "save:aten.mm"]
)
def test_checkpointing_goes_by_name(name: str) -> None:
    check_memory(MemorySection(checkpointing=name), "job")


@pytest.mark.parametrize("name", ["some", "layers:", "layers:0", "layers:-1", "save:", "full "])
def test_an_unknown_checkpointing_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError) as caught:
        check_memory(MemorySection(checkpointing=name), "job")
    assert str(caught.value).startswith("job: memory.checkpointing: expected one of none, full, ")
    assert str(caught.value).endswith(f"got {name!r}.")


@pytest.mark.parametrize("runtime", ["shardwright", "fsdp2"])
def test_runtimes_that_share_everything_share_no_less(runtime: Runtime) -> None:
    with pytest.raises(InputError) as caught:
        check_memory(MemorySection(runtime=runtime, zero=1), "job")
    assert str(caught.value) == (
        f"job: memory.zero: expected nothing beside runtime = '{runtime}', got 1. Optimizer states "
        "alone are shared by memory.runtime = 'ddp' with "
        "torch.distributed.optim.ZeroRedundancyOptimizer."
    )


@pytest.mark.parametrize("runtime", ["shardwright", "fsdp2", "ddp"])
def test_zero_2_is_what_no_runtime_does(runtime: Runtime) -> None:
    with pytest.raises(InputError, match=r"got 2\. No runtime here .* SHARD_GRAD_OP"):
        check_memory(MemorySection(runtime=runtime, zero=2), "job")


@pytest.mark.parametrize("runtime", ["shardwright", "ddp"])
def test_only_fsdp2_has_parameters_on_the_host(runtime: Runtime) -> None:
    with pytest.raises(InputError, match=r"memory\.offload: expected 'none' or 'states' beside"):
        check_memory(MemorySection(runtime=runtime, offload="all"), "job")
    check_memory(MemorySection(runtime="fsdp2", offload="all"), "job")
    check_memory(MemorySection(runtime=runtime, offload="states"), "job")


def test_eight_bit_products_have_one_scale_per_tensor_unless_rows_are_named() -> None:
    assert float8_scaling(MemorySection()) is None
    assert float8_scaling(MemorySection(float8=True)) == "tensorwise"
    assert float8_scaling(MemorySection(float8="rowwise")) == "rowwise"
