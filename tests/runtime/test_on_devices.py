"""The runtime of one rank beside plain modules, on a CPU and where there is one on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from tracker_tasks import fake_world

import shardwright as sw
from shardwright.core.block import Block
from shardwright.runtime.deferred_init import Deferred
from shardwright.runtime.embeddings.initial import blocks_of_whole
from shardwright.runtime.embeddings.route import Table
from shardwright.runtime.embeddings.shard import make_tables
from shardwright.runtime.units.dstorage import units_in
from shardwright.tracker.memory import MemoryTracker

STEPS = 3
WORDS, DIM = 64, 32
HALF = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Numbers = dict[str, torch.Tensor]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    """The one rank of a group of NCCL, on a CPU of gloo."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Words [B, T] to logits [B, T, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM))
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def net(device: str) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def batches(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (4, 8), generator=generator).to(device) for _ in range(STEPS)]


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.layers:
        sw.fully_shard_flat(layer, mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)
    return model


def passes(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model(words).float().flatten(0, 1), words.flatten())
    loss.backward()
    return loss.detach()


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def gradients(model: nn.Module) -> Numbers:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def weights(model: nn.Module) -> Numbers:
    return {name: whole(p) for name, p in model.named_parameters()}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Numbers:
    for words in batches(device):
        optimizer.zero_grad()
        passes(model, words)
        optimizer.step()
    return {**gradients(model), **{f"{n} itself": w for n, w in weights(model).items()}}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def flat_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(sw.optimizer_parameters(model), lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_strategy": "flat"},
        {"shard_strategy": "flat", "zero": 2, "bucket_size": 2000},
        {"shard_strategy": "per_param", "zero": 1},
        {"shard_strategy": "param_boundary", "prefetch": 1},
        {"placements": (sw.Replicate(),)},
        {"shard_strategy": "flat", "cpu_offload": True, "prefetch": 1},
        {"shard_strategy": "per_param", "zero": 2, "cpu_offload": True},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_training_is_that_of_the_plain_module(
    device: str, mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    plain, model = net(device), net(device)
    if "bucket_size" in options:
        sw.fully_shard_flat(model, mesh, **options)
    else:
        sharded(model, mesh, **options)
    found = trained(model, flat_sgd(model), device)
    wanted = trained(plain, sgd(plain), device)
    place = "cpu" if options.get("cpu_offload") else device
    assert {value.device.type for value in found.values()} == {place}
    wanted = {name: value.to(place) for name, value in wanted.items()}
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_gradients_in_half_are_those_of_the_module_in_half(device: str, mesh: DeviceMesh) -> None:
    plain, words = net(device).bfloat16(), batches(device)[0]
    model = sharded(net(device), mesh, shard_strategy="flat", precision=HALF)
    torch.testing.assert_close(passes(model, words), passes(plain, words), rtol=1e-2, atol=1e-2)
    wanted = {name: value.float() for name, value in gradients(plain).items()}
    torch.testing.assert_close(gradients(model), wanted, rtol=2e-2, atol=1e-3)


def test_clipping_is_torchs(device: str, mesh: DeviceMesh) -> None:
    plain, words = net(device), batches(device)[0]
    model = sharded(net(device), mesh)
    passes(model, words), passes(plain, words)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(sw.clip_grad_norm_(model, 0.05), wanted)
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("strategy", ["flat", "per_param"])
def test_matrices_of_muon_are_those_of_torchs(device: str, mesh: DeviceMesh, strategy: str) -> None:
    plain, model = net(device), sharded(net(device), mesh, shard_strategy=strategy)

    def matrices(of: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in of.named_parameters() if "layers" in name and p.ndim == 2]

    found = trained(model, sw.Muon(matrices(model), lr=0.02), device)
    wanted = trained(plain, torch.optim.Muon(matrices(plain), lr=0.02), device)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)  # products in bf16


def test_averages_in_eight_bits_are_those_of_a_cpu(device: str, mesh: DeviceMesh) -> None:
    """Codes may differ by one where a sum was made in another order."""
    plain, model = net("cpu"), sharded(net(device), mesh, shard_strategy="flat", block_size=256)
    optimizer = sw.AdamW8bit(sw.optimizer_parameters(model), lr=1e-2)
    found = trained(model, optimizer, device)
    wanted = trained(plain, sw.AdamW8bit(plain.parameters(), lr=1e-2), "cpu")
    for name, value in wanted.items():
        if name.endswith("itself"):
            near = (found[name].cpu() - value).abs() < 2e-3
            assert near.float().mean() > 0.99, name


def test_offloaded_shards_are_pinned_and_what_computes_is_not(
    device: str, mesh: DeviceMesh
) -> None:
    model = sharded(net(device), mesh, shard_strategy="flat", cpu_offload=True)
    seen = set()
    model.head.register_forward_pre_hook(lambda module, _: seen.add(module.weight.device.type))
    passes(model, batches(device)[0])
    assert seen == {device}
    shards = [unit.buffers.shard for unit in units_in(model)]
    assert all(shard.device.type == "cpu" for shard in shards)
    assert all(shard.is_pinned() for shard in shards) == (device == "cuda")


def test_buffers_of_another_device_come_to_that_of_the_ranks() -> None:
    with fake_world(0, 2) as mesh, FakeTensorMode():
        model = nn.BatchNorm1d(8)
        model.running_mean = torch.zeros(8, device="cuda")
        model.running_var = model.running_mean
        sw.fully_shard_flat(model, mesh)
        assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
        assert model.running_var is model.running_mean


def test_buffers_are_where_the_ranks_compute(device: str, mesh: DeviceMesh) -> None:
    """As FSDP2 has it: a module may be made on the CPU."""
    model = nn.BatchNorm1d(8)
    sw.fully_shard_flat(model, mesh)
    model(torch.randn(4, 8, device=device)).sum().backward()
    assert {buffer.device.type for buffer in model.buffers()} == {device}


def test_a_checkpoint_comes_back_bit_by_bit(device: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    def made(strategy: str) -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(net(device), mesh, shard_strategy=strategy)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, other = made("flat"), made("per_param")
    trained(*model, device)
    sw.save_checkpoint(tmp_path, *model, step=1)
    assert sw.load_checkpoint(tmp_path, *other).step == 1
    torch.testing.assert_close(weights(other[0]), weights(model[0]), rtol=0, atol=0)
    for saved, loaded in zip(model[1].state.values(), other[1].state.values(), strict=True):
        for name, value in saved.items():
            torch.testing.assert_close(whole(loaded[name]), whole(value), rtol=0, atol=0)


def test_what_was_built_later_has_the_numbers_of_what_was_built_at_once(
    device: str, mesh: DeviceMesh
) -> None:
    torch.manual_seed(0)
    deferred = Deferred()
    with deferred:
        model: Any = Net()
    deferred.settle(model)
    sharded(model, mesh)
    start = vars(model).pop("initial_block")
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(start(name, (0,) * len(shape), shape).to(device))
    torch.testing.assert_close(weights(model), weights(net(device)), rtol=0, atol=0)


def test_a_tracker_of_sharded_training_says_what_the_allocator_does(
    device: str, mesh: DeviceMesh
) -> None:
    model = sharded(net(device), mesh, shard_strategy="flat")
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model), fused=True)
    for words in batches(device):  # the first makes workspaces, which are no tensors
        with MemoryTracker(model, optimizer, inputs=words) as tracker:
            passes(model, words)
            optimizer.step()
            optimizer.zero_grad()
    result = tracker.result()
    assert result.peak.bytes > 0
    if device == "cuda":
        assert result.device is not None
        begin, _ = tracker.log.iterations[0]
        workspaces = result.device.before - tracker.log.totals()[begin]
        assert workspaces >= 0
        assert result.peak.bytes + workspaces == pytest.approx(result.device.active_peak, rel=0.05)


TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, eps=1e-8),
}


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("optimizer", TORCHS)
def test_rows_are_looked_up_and_updated_as_those_of_embedding_bags(
    device: str, mesh: DeviceMesh, optimizer: str, replicated: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    names, rows, dim = ("a", "b"), 50, 16
    start = {n: torch.randn(rows, dim, generator=generator).to(device) for n in names}
    bags = {n: nn.EmbeddingBag.from_pretrained(copy.deepcopy(start[n]), False) for n in names}
    for bag in bags.values():
        bag.mode = "sum"
    usual = TORCHS[optimizer]([bag.weight for bag in bags.values()])
    options = {"replicated": replicated}
    tables = [Table(n, n, rows, dim, (f"f {n}",), optimizer, "sum", **options) for n in names]
    blocks = [Block(n, "parameter", (0, 0), (rows, dim), 0) for n in names]
    module = make_tables(tables, blocks, mesh, blocks_of_whole(start), 0.1)
    for _ in range(STEPS):
        ids = torch.randint(rows, (2, 40), generator=generator).to(device)
        offsets = torch.arange(0, 41, 4, device=device)
        found = module({f"f {n}": (ids[place], offsets) for place, n in enumerate(names)})
        wanted = {n: bags[n](ids[place], offsets[:-1]) for place, n in enumerate(names)}
        for n in names:
            torch.testing.assert_close(found[f"f {n}"], wanted[n])
        usual.zero_grad()
        sum(part.square().sum() for part in wanted.values()).backward()
        sum(part.square().sum() for part in found.values()).backward()
        usual.step()
    kept = sw.full_state_dict(module)
    for n in names:
        torch.testing.assert_close(
            kept[n].to(device), bags[n].weight.detach(), rtol=1e-4, atol=1e-5
        )
