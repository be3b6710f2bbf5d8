from __future__ import annotations

import pytest

from shardwright.core.errors import InputError
from shardwright.core.memory_section import (
    MemorySection,
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


def test_what_shares_nothing_has_no_degree_of_sharing() -> None:
    with pytest.raises(InputError, match=r"memory\.zero: expected nothing beside runtime = 'ddp'"):
        check_memory(MemorySection(runtime="ddp", zero=1), "job")


def test_eight_bit_products_have_one_scale_per_tensor_unless_rows_are_named() -> None:
    assert float8_scaling(MemorySection()) is None
    assert float8_scaling(MemorySection(float8=True)) == "tensorwise"
    assert float8_scaling(MemorySection(float8="rowwise")) == "rowwise"
