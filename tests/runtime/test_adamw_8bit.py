"""AdamW in 8 bits of one process, beside a slow one written from the papers alone."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.core.errors import InputError, ShardwrightError, UnsupportedError
from shardwright.core.optimizer_states import CHUNK_ELEMENTS, UPDATE_PASSES
from shardwright.runtime.adamw_8bit import AdamW8bit, _Room, dynamic_code

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-8, 0.1
STEPS = 4
SHAPES = ((64, 64), (17, 257), (5000,), (3, 5, 300), (CHUNK_ELEMENTS + 1000,), (4095,), (7,), ())


def _code(signed: bool) -> torch.Tensor:
    """The paper's: decades from 1e-6 on, each with twice the fractions, middles of even bins."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_paper(signed: bool) -> None:
    found = torch.tensor(dynamic_code(signed=signed), dtype=torch.float64)
    assert len(found.unique()) == 256
    torch.testing.assert_close(found, _code(signed), rtol=1e-12, atol=0)
    assert found[0].item() == pytest.approx(-0.99296875 if signed else 0.0)


class _Slow:
    """AdamW on fp64 numbers, whose averages go through codes of one block after the other."""

    def __init__(self, shape: tuple[int, ...], block: int) -> None:
        self.numel, self.block = math.prod(shape), block
        self.large = self.numel >= 4096
        self.averages = [torch.zeros(self.numel, dtype=torch.float64) for _ in range(2)]
        self.codes: list[torch.Tensor] = []

    def step(self, weight: torch.Tensor, gradient: torch.Tensor, number: int) -> torch.Tensor:
        first, second = self.averages
        w, g = weight.double().view(-1), gradient.double().view(-1)
        first = BETAS[0] * first + (1 - BETAS[0]) * g
        second = BETAS[1] * second + (1 - BETAS[1]) * g * g
        w = w * (1 - LR * DECAY)
        root = (second / (1 - BETAS[1] ** number)).sqrt()
        w = w - LR * first / (1 - BETAS[0] ** number) / (root + EPS)
        self.averages = [first, second]
        if self.large:
            both = [self._through_codes(a, signed=a is first) for a in self.averages]
            self.averages, self.codes = [v for v, _ in both], [c for _, c in both]
        return w.view(weight.shape).float()

    def _through_codes(self, average: torch.Tensor, signed: bool) -> tuple[Any, Any]:
        table, values, codes = _code(signed), [], []
        for block in average.split(self.block):
            scale = block.abs().max()
            found = (block[:, None] / scale - table).abs().argmin(1)
            values.append(table[found] * scale)
            codes.append(found)
        return torch.cat(values), torch.cat(codes)


def _train(
    optimizer: AdamW8bit, parameters: list[torch.nn.Parameter], steps: range = range(STEPS)
) -> None:
    for step in steps:
        for place, parameter in enumerate(parameters):
            parameter.grad = _gradient(parameter, place, step)
        optimizer.step()


def _gradient(parameter: torch.Tensor, place: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * place + step)
    sizes = torch.rand(parameter.shape, generator=generator).mul(-6).exp()
    drawn = torch.randn(parameter.shape, generator=generator) * sizes
    return drawn.to(parameter.dtype)


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def _made(parameters: Any, **options: Any) -> AdamW8bit:
    return AdamW8bit(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **options)


@pytest.mark.parametrize("block", [256, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_a_slow_one(shape: tuple[int, ...], block: int) -> None:
    (parameter,) = _parameters(shape)
    optimizer, slow = _made([parameter], block_size=block), _Slow(shape, block)
    weight = parameter.detach().clone()
    for step in range(STEPS):
        weight = slow.step(weight, _gradient(weight, 0, step), step + 1)
        _train(optimizer, [parameter], range(step, step + 1))
    apart = (parameter.detach() - weight).abs()  # in fp32 a few are beyond the middle of two codes
    assert (apart > 1e-6).double().mean() < 1e-3
    assert apart.max() < LR
    state = optimizer.state[parameter]
    if slow.large:
        for name, wanted in zip(("exp_avg", "exp_avg_sq"), slow.codes, strict=True):
            assert state[name].dtype == torch.uint8
            assert state[name].shape == parameter.shape
            assert state[f"{name}_scale"].shape == (math.ceil(slow.numel / block),)
            apart = (state[name].view(-1).int() - wanted).abs()
            assert (apart > 0).double().mean() < 1e-3
    else:
        assert state["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(state["exp_avg"].view(-1).double(), slow.averages[0])


def test_small_parameters_are_updated_as_adamw_does() -> None:
    ours, theirs = _parameters((64, 63), (5,)), _parameters((64, 63), (5,))
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    other = torch.optim.AdamW(theirs, fused=True, **options)
    _train(_made(ours), ours)
    _train(other, theirs)  # type: ignore[arg-type]
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-7)


def test_an_element_does_not_depend_on_where_its_tensor_ends() -> None:
    (long,), (short,) = _parameters((8192,)), _parameters((8192 - 256 + 3,))
    short.data.copy_(long.data[: short.numel()])
    pairs = [(_made([each]), each) for each in (long, short)]
    for step in range(STEPS):
        gradient = _gradient(long, 0, step)
        gradient[short.numel() :] = 0
        for optimizer, each in pairs:
            each.grad = gradient[: each.numel()].clone()
            optimizer.step()
    assert torch.equal(long[: short.numel()], short)
    one, two = (optimizer.state[each] for optimizer, each in pairs)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(one[name][: short.numel()], two[name])
        assert torch.equal(one[f"{name}_scale"][:-1], two[f"{name}_scale"][: 8192 // 256 - 1])


def test_blocks_without_a_gradient_stay_zero() -> None:
    (parameter,) = _parameters((8192,))
    optimizer = _made([parameter])
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(parameter, before * (1 - LR * DECAY))
    assert not optimizer.state[parameter]["exp_avg_scale"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision_are_updated_in_fp32(dtype: torch.dtype) -> None:
    shape = (CHUNK_ELEMENTS + 77,)
    (parameter,) = _parameters(shape, dtype=dtype)
    optimizer, slow = _made([parameter]), _Slow(shape, 256)
    weight = parameter.detach().float()
    for step in range(STEPS):
        gradient = _gradient(parameter, 0, step)
        weight = slow.step(weight.to(dtype), gradient, step + 1)
        _train(optimizer, [parameter], range(step, step + 1))
    apart = (parameter.detach() - weight.to(dtype)).abs()
    assert (apart > 1e-6).double().mean() < 1e-3
    assert apart.max() < LR
    assert optimizer.state[parameter]["exp_avg_scale"].dtype == torch.float32


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "torch.save"])
def test_another_one_goes_on_with_its_state_bit_by_bit(way: str) -> None:
    shapes = ((80, 80), (4099,), (11,))
    one, two = _parameters(*shapes, dtype=torch.bfloat16), _parameters(*shapes)
    two = [torch.nn.Parameter(p.detach().to(torch.bfloat16)) for p in two]
    optimizer, other = _made(one), _made(two)
    _train(optimizer, one, range(2))
    for target, source in zip(two, one, strict=True):
        target.data.copy_(source.data)
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
        two = other.param_groups[0]["params"]
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
    else:
        other.load_state_dict(optimizer.state_dict())
    _train(optimizer, one, range(2, 4))
    _train(other, two, range(2, 4))
    for p, q in zip(one, two, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name]), name


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_the_nearest_code_is_found_of_every_number(name: str, on_gpu: bool) -> None:
    table = _code(signed=name == "exp_avg")
    near = ((table[1:] + table[:-1]) / 2).float()
    drawn = torch.rand(100_000).mul(-20).exp()
    magnitudes = torch.cat((near.abs(), near.abs().nextafter(near * 0), drawn, torch.zeros(9)))
    numbers = torch.cat((magnitudes, -magnitudes) if name == "exp_avg" else (magnitudes,))
    numbers = numbers[: len(numbers) // 256 * 256]
    numbers[::256] = 1.0  # the scale of every block
    parameter = torch.nn.Parameter(torch.zeros(len(numbers)))
    state = _made([parameter]).initial_state(parameter)
    room = _Room(torch.device("cpu"), 256, 2 * len(numbers), cast=False, on_gpu=on_gpu)
    for begin in range(0, len(numbers), room.size):
        part = numbers[begin : begin + room.size]
        place = ("exp_avg", "exp_avg_sq").index(name)
        room.averages[place][: len(part)] = part
        room._write(place, state[name][begin : begin + len(part)], state, begin)
    wanted = torch.bucketize(numbers, near, right=True)
    assert torch.equal(state[name].long(), wanted)
    least = (numbers.double()[:, None] - table).abs().min(1).values
    torch.testing.assert_close(
        (numbers.double() - table[wanted]).abs(), least, rtol=1e-6, atol=1e-7
    )


def test_weights_that_are_not_contiguous_are_updated_in_their_own_order() -> None:
    (whole,) = _parameters((80, 70))
    turned = torch.nn.Parameter(whole.detach().clone().t().contiguous().t())
    assert not turned.is_contiguous()
    _train(_made([whole]), [whole])
    _train(_made([turned]), [turned])
    assert torch.equal(whole, turned)


REFUSED: dict[str, tuple[Any, type[ShardwrightError], str]] = {
    "block": (lambda p: AdamW8bit(p, block_size=0), InputError, "block_size: expected 1 or more"),
    "rate": (lambda p: AdamW8bit(p, lr=-1.0), InputError, "lr of AdamW8bit: expected numbers from"),
    "betas": (lambda p: AdamW8bit(p, betas=(0.9, 1.0)), InputError, "betas of AdamW8bit"),
    "group": (
        lambda p: AdamW8bit([{"params": p, "block_size": 512}]),
        InputError,
        "block_size of a group: expected 256, as for all groups, got 512",
    ),
    "double": (
        lambda p: AdamW8bit([torch.nn.Parameter(torch.ones(3).double())]),
        UnsupportedError,
        "AdamW8bit: expected parameters of fp32, bf16 or fp16, got torch.float64",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_do_is_refused_in_a_line(what: str) -> None:
    make, kind, text = REFUSED[what]
    with pytest.raises(kind, match=text):
        make(_parameters((3, 3)))


def test_sparse_gradients_are_refused() -> None:
    (parameter,) = _parameters((3, 3))
    parameter.grad = torch.zeros(3, 3).to_sparse()
    with pytest.raises(UnsupportedError, match="expected dense gradients, got a sparse one"):
        _made([parameter]).step()


class _Kernels(TorchDispatchMode):
    """Operators that write to tensors, and the bytes that they read and write."""

    FILLS = ("copy_", "zero_")  # which read nothing of what they write

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
        given |= kwargs or {}
        moved = 0
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            writes = argument.alias_info is not None and argument.alias_info.is_write
            writes &= argument.name != "grads"  # of a fused step, which may scale them
            reads = not (writes and (argument.is_out or func.overloadpacket.__name__ in self.FILLS))
            its = [t for t in tree_leaves(given.get(argument.name)) if torch.is_tensor(t)]
            moved += (reads + writes) * sum(t.nbytes for t in its)
        self.launches += moved >= 100  # not the counter of steps, nor nothing
        self.nbytes += moved
        return func(*args, **kwargs or {})


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's tensors are updated as those of an accelerator are."""

    def room(*args: Any, **how: Any) -> _Room:
        return _Room(*args, **(how | {"on_gpu": True}))

    monkeypatch.setattr("shardwright.runtime.adamw_8bit._Room", room)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_update_is_as_many_kernels_and_bytes_as_its_price_says() -> None:
    parameter = torch.nn.Parameter(torch.ones(CHUNK_ELEMENTS))
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.ones(CHUNK_ELEMENTS)
    optimizer.step()
    with _Kernels() as kernels:
        optimizer.step()
    assert kernels.launches == 18
    assert kernels.nbytes / parameter.nbytes == pytest.approx(UPDATE_PASSES, rel=0.01)
