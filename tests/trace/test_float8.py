"""What linear layers in fp8 keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.errors import InputError
from shardwright.trace.checkpointing import apply_checkpointing
from shardwright.trace.compiled import apply_compile
from shardwright.trace.lowering import lowering
from shardwright.trace.lowering.kernels import Kernels
from shardwright.trace.lowering.lowered import Lowering
from shardwright.trace.treatment import apply_float8

Step = Callable[..., tuple[int, int, set[str]]]


def in_float8(treat: Any, recipe: str, blocks: list[nn.Module], **options: Any) -> Any:
    for block in blocks:
        apply_float8(block, recipe)
    return treat(blocks, **options)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_activations_do_not_shrink(step: Step, recipe: str, policy: str) -> None:
    cuda = partial(lowering, "cuda")
    treat = partial(apply_checkpointing, policy_name=policy)
    plain, _, _ = step(treat, cuda, 2)
    after, _, operators = step(partial(in_float8, treat, recipe), cuda, 2)
    largest = 2 * 7 * 2 * 2  # of two factors of seven products in two blocks, bf16
    assert after - plain == (largest if (recipe, policy) == ("tensorwise", "selective") else 0)
    assert "aten::_scaled_mm" in operators


@pytest.mark.slow
def test_compiled_casts_take_no_fp32_values(step: Step) -> None:
    cuda = partial(lowering, "cuda")
    eager = partial(in_float8, apply_checkpointing, "tensorwise")
    compiled = partial(in_float8, apply_compile, "tensorwise")
    _, most, _ = step(partial(eager, policy_name="full"), cuda, 1)
    _, peak, _ = step(partial(compiled, checkpointing="full"), cuda, 1)
    assert peak < most - 3 * 8192 * 14336  # the widest value in fp32 beside its fp8


def test_every_gradient_has_the_shape_and_dtype_of_its_parameter() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(32, 64, dtype=torch.bfloat16), nn.ReLU())
        x = torch.empty(2, 8, 32, dtype=torch.bfloat16, requires_grad=True)
        with apply_float8(model):
            model(x).sum().backward()
        for tensor in (*model.parameters(), x):
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)


def test_the_head_and_odd_sizes_stay_as_they_are() -> None:
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(16, 32),
            "odd": nn.Linear(16, 30),
            "output": nn.Linear(16, 32),
            "inner": nn.ModuleDict({"deep": nn.Linear(32, 16)}),
        }
    )
    with apply_float8(model) as converted:
        assert converted.blocks == [model["wide"], model["inner"]["deep"]]
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"memory\.float8: expected tensorwise or rowwise, got 'blockwise'"
    ):
        apply_float8(nn.Linear(16, 16), "blockwise")


def inductor_without_kernels() -> Callable[..., Any]:
    """Inductor up to its partition; what it leaves runs as it is."""

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def as_it_is(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of dynamo's and Inductor's own
@pytest.mark.parametrize("recipe", ["", "tensorwise", "rowwise"])
def test_a_compiled_block_keeps_what_torch_compile_keeps(
    block: Callable[..., nn.Module],
    stream: Callable[..., tuple[Tensor, ...]],
    saved: Callable[..., int],
    recipe: str,
) -> None:
    """No fp8 copy of a weight, which dynamo tells the partitioner is free to keep as it is."""
    model, inputs = block(small=True), stream(sequence=96, small=True)
    if recipe:
        apply_float8(model, recipe)
    with Lowering(Kernels("cpu", rms_norm="composite"), inner=False):  # a compiler takes it apart
        run = torch.compile(model, backend=inductor_without_kernels())
        truth = saved(lambda: run(*inputs), but=[*model.parameters(), *inputs])
    torch._dynamo.reset()
    with apply_compile([model], kernels=Kernels("cpu")) as done:
        model(*inputs)  # traced
        ours = saved(lambda: model(*inputs), but=[*model.parameters(), *inputs])
    assert not done.notes
    assert ours == truth
