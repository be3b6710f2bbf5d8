from __future__ import annotations

import pytest

from shardwright.core.errors import InputError
from shardwright.core.tensor import ELEMENT_BYTES, TensorSpec, element_bytes


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0,), 0), ((3, 0), 0), ((2, 3, 4), 24), ((2**40, 2**16), 2**56)]
)
def test_elements_are_the_product_of_the_shape(shape: tuple[int, ...], numel: int) -> None:
    assert TensorSpec("w", shape).numel == numel


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BYTES))
def test_bytes_are_elements_times_the_size_of_one(dtype: str) -> None:
    assert TensorSpec("w", (5, 3), dtype).nbytes == 15 * element_bytes(dtype)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        element_bytes("fp31", "tables[0].dtype")
    assert str(caught.value) == (
        "tables[0].dtype: expected one of fp64, fp32, bf16, fp16, fp8, fp8_e5m2, "
        "complex128, complex64, int64, int32, int16, int8, uint8, bool, got 'fp31'. "
        "Did you mean 'fp32'?"
    )
