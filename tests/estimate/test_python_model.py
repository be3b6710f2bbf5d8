"""Modules of a user's own: few of their layers tell of all of them, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.recording import Recording
from shardwright.core.timeline import Kind, Phase
from shardwright.estimate.own_model import python_function
from shardwright.estimate.recorded import ModuleRequest
from shardwright.estimate.recorded import recorded as recording_of
from shardwright.estimate.unplanned import machine_of, optimizer_of, sharding
from shardwright.heap.ledger import Ledger
from shardwright.heap.rank_step import Chunk, RankStep
from shardwright.job.job import Job, degrees_of, memory_of, parse_job
from shardwright.trace.treatment import Treatment
from shardwright.tracker.memory import MemoryTracker

HERE = Path(__file__).parent
BATCH, SEQUENCE = 3, 8


@pytest.fixture(autouse=True)
def _beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def job_of(name: str, arguments: dict[str, Any] | None = None, **memory: Any) -> Job:
    world = memory.pop("world", 4)
    return parse_job(
        {
            "model": {"python": name, "arguments": arguments or {}},
            "cluster": {"world_size": world},
            "batch": {"size": BATCH, "sequence": SEQUENCE},
            "memory": {"runtime": "fsdp2", "lowering": "cpu", **memory},
        }
    )


def recorded(job: Job, **options: Any) -> tuple[Recording, int]:
    section = memory_of(job)
    treatment = Treatment(section.lowering or "cuda", section.policy)
    request = ModuleRequest.of(job, treatment, BATCH)
    return recording_of(msgspec.structs.replace(request, **options))[:2]


def peaks(job: Job, **options: Any) -> dict[Phase, dict[Kind, int]]:
    section, recording = memory_of(job), recorded(job, **options)[0]
    found = sharding(section, degrees_of(job, job.cluster.world_size or 1), False)
    heap = Ledger()
    RankStep([Chunk(recording)], optimizer=optimizer_of(job)).run(heap, machine_of(section, found))
    return {
        phase: {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
        for phase, kinds in heap.peaks.items()
    }


MODELS = {
    "encoder": "architectures:encoder",
    "convolutions": "architectures:convolutions",
    "translator": "architectures:translator",
    "alternating": "architectures:alternating",
    "skipping": "architectures:skipping",
    "taking_turns": "architectures:taking_turns",
    "looping": "architectures:looping",
    "adapted": "architectures:adapted",
    "in_place": "architectures:in_place",
}


OFTEN = ("convolutions", "taking_turns", "looping")  # other tests have a look at these


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.product) if name in OFTEN else name for name in MODELS],
)
def test_few_layers_of_each_kind_add_up_to_what_all_of_them_take(name: str) -> None:
    job = job_of(MODELS[name])
    recording, parameters = recorded(job)
    everything, as_many = recorded(job, full=True)
    assert len(recording.pieces) < len(everything.pieces)
    assert parameters == as_many
    assert recording.buffers == everything.buffers
    assert peaks(job) == peaks(job, full=True)


@pytest.mark.parametrize(("run", "noted"), [(1, 0), (4, 1), (5, 1), (8, 1), (9, 0)])
def test_layers_that_a_module_picks_by_number_are_those_that_run(run: int, noted: int) -> None:
    """Of few of them another number would run."""
    job = job_of("architectures:halfway", {"depth": 9, "run": run})
    assert peaks(job) == peaks(job, full=True)
    recording = recorded(job)[0]
    said = [note for note in recording.notes if "does not run as it would among few" in note]
    assert len(said) == noted
    idle = [name for unit in recording.units for name in unit.frozen if ".queries." in name]
    assert not noted or len(idle) == 2 * (9 - run)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("encoder", {"checkpointing": "full"}),
        ("alternating", {"checkpointing": "layers:2", "runtime": "ddp"}),
        ("encoder", {"checkpointing": "first:2"}),
        ("skipping", {"checkpointing": "selective", "lowering": "cuda", "param_dtype": "fp32"}),
        ("recurrent", {"runtime": "ddp"}),
    ],
)
def test_few_layers_add_up_under_every_policy_and_runtime(name: str, memory: Any) -> None:
    job = job_of(f"architectures:{name}", **memory)
    assert len(recorded(job)[0].pieces) < len(recorded(job, full=True)[0].pieces)
    assert peaks(job) == peaks(job, full=True)


@pytest.mark.slow
def test_a_network_fifty_layers_deep_is_recorded_as_one_of_four() -> None:
    deep = recorded(job_of("architectures:taking_turns", {"depth": 50}))[0]
    shallow = recorded(job_of("architectures:taking_turns", {"depth": 4}))[0]
    assert len(deep.pieces) == len(shallow.pieces)
    assert deep.series[0].names[-1] == "mixers.49"
    assert deep.series[0].recorded == ("mixers.0", "mixers.1", "mixers.49")


def test_names_are_those_of_the_whole_module() -> None:
    recording = recorded(job_of("architectures:alternating"))[0]
    assert recording.series[0].recorded[-1] == "layers.layer10"
    skipped = recorded(job_of("architectures:skipping"))[0]
    last = next(unit for unit in skipped.units if unit.name == "up.6")
    assert last.tensors[0].fqn == "up.6.0.weight"
    modules = {touch.module for piece in skipped.pieces for touch in piece.touches}
    assert "up.6.1.inner.3" in modules
    assert "up.2" not in modules


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("numbered", {}, "it does not run with fewer (IndexError: index 3 is out of range)"),
        ("growing", {}, "what they keep does not go up evenly with their number"),
        ("skipping", {"more": 2}, "it does not run with fewer (IndexError: pop from empty list)"),
    ],
)
def test_where_few_layers_do_not_stand_for_all_they_are_traced_and_a_note_says_so(
    name: str, arguments: dict[str, Any], reason: str
) -> None:
    job = job_of(f"architectures:{name}", arguments)
    notes = recorded(job)[0].notes
    assert any(note.endswith(f"not a few of each kind: {reason}") for note in notes)
    assert peaks(job) == peaks(job, full=True)


def test_a_layer_that_stands_twice_is_no_unit_of_its_own() -> None:
    recording = recorded(job_of("architectures:looping", {"rounds": 1, "twice": True}))[0]
    names = [unit.name for unit in recording.units]
    assert "layers.0" not in names
    assert "layers.1" in names
    root = next(unit for unit in recording.units if unit.name == "")
    assert "layers.0.inner.1.weight" in [tensor.fqn for tensor in root.tensors]


def test_frozen_parameters_are_in_their_units_and_named() -> None:
    recording, parameters = recorded(job_of("architectures:adapted"))
    unit = next(unit for unit in recording.units if unit.name == "1")
    assert [tensor.fqn for tensor in unit.tensors if tensor.fqn not in unit.frozen] == [
        "1.down.weight",
        "1.up.weight",
    ]
    assert "1.base.weight" in unit.frozen
    assert parameters == 30 * 16 + 7 * (64 * 16 + 64 + 64 * 16 + 16 + 2 * 16 + 2 * 64) + 17 * 30


def test_parameters_keep_the_dtype_they_were_made_in_beside_that_of_computing() -> None:
    recording = recorded(job_of("architectures:taking_turns", param_dtype="bf16"))[0]
    assert {tensor.dtype for unit in recording.units for tensor in unit.tensors} == {"fp32"}
    taken = [t.nbytes for p in recording.pieces for t in p.touches if t.what == "gradient"]
    weight = 16 * 16 * 2
    assert weight in taken


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["encoder", "grouped", "convolutions"])
def test_a_real_step_takes_what_was_estimated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(
        f"architectures:{name}",
        runtime="ddp",
        world=1,
        param_dtype="fp32",
        implementation="foreach",
    )
    estimated = peaks(job)
    sizes = {"batch": BATCH, **({} if name == "convolutions" else {"sequence": SEQUENCE})}
    monkeypatch.syspath_prepend(HERE)
    model, inputs, *given = python_function(f"architectures:{name}", "")(**sizes)
    loss = given[0] if given else torch.Tensor.mean
    measured = _measured(model, inputs, loss)
    for phase in ("forward", "backward", "step"):
        assert sum(estimated[phase].values()) == sum(measured[phase].values()), phase
        for kind in ("weight", "optimizer_state", "buffer"):
            assert estimated[phase].get(kind) == measured[phase].get(kind), (phase, kind)


def _measured(model: nn.Module, inputs: torch.Tensor, loss: Any) -> dict[Phase, dict[Kind, int]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a few thousand numbers: several threads would wait for one another
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        loss(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    targets = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    with MemoryTracker(model, optimizer, inputs=(inputs, targets)) as seen:
        step()
    torch.set_num_threads(threads)
    return seen.peaks


def test_a_function_may_read_numbers_that_it_made_and_cast_what_it_built(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(nn.Linear(8, 8).state_dict(), weights)
    recording, parameters = recorded(
        job_of("architectures:started", {"weights": str(weights)}, param_dtype="fp32")
    )
    assert parameters == 10 * 8 + 4 * (8 * 8 + 8)
    dtypes = {t.fqn: t.dtype for unit in recording.units for t in unit.tensors}
    assert dtypes["0.weight"] == "fp32"
    assert dtypes["1.weight"] == "bf16"


def test_targets_are_inputs_of_the_loss() -> None:
    plain, aimed = (
        recorded(job_of("architectures:aimed", {"targets": n}))[0] for n in (False, True)
    )
    assert aimed.inputs - plain.inputs == BATCH * SEQUENCE * 8


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "mismatched": (
        "module '1' (Linear): expected a module that runs on fake tensors with (float32 [3, 4]),"
        " got RuntimeError: a and b must have same reduction dim, but got [3, 8] X [4, 8]."
        " Give what it takes: "
    ),
    "reads": (
        "module 'layers.0.1' (Reads), broken.py:30 (forward): "
        "expected a forward that does not read values of tensors,"
        " got aten._local_scalar_dense.default, as of .item(), .tolist() or an if on a tensor."
        " Put a number there for the estimate, or compute with the tensor."
    ),
    "collects": "an if on a tensor. Give train.table_optimizer: its tables are a plan's then,",
    "branches": "module 'layers.0.1' (Branches), broken.py:35 (forward): "
    "expected a forward that does not read values",
    "masks": (
        "module 'layers.0.1' (Masks), broken.py:40 (forward): "
        "expected shapes that do not depend on values,"
        " got aten.nonzero.default, whose result is as large as its values say."
    ),
    "counts": "module 'layers.0.1' (Counts), broken.py:45 (forward): "
    "expected shapes that do not depend on values",
    "decodes": "an if on a tensor. Call it with tgt_is_causal=True or False,",
    "encodes": "an if on a tensor. Call it with is_causal=True or False (src_is_causal of",
    "points": "module 'layers.0.1' (Points), broken.py:72 (forward): "
    "expected a forward of torch's operators alone",
    "numpy": "module 'layers.0.1' (Numpy), broken.py:77 (forward): "
    "expected a forward of torch's operators alone",
    "kernel": (
        "module 'layers.0.1' (Kernel), broken.py:82 (forward): "
        "expected operators that have a fake implementation,"
        " got shardwright_tests.without_fake.default. Register one with torch.library.register_fake"
    ),
    "raises": "expected a function that returns a module, (module, inputs), (module, inputs, loss),"
    " (module, inputs, loss, targets) or a task, got ValueError: no such flavour. It runs on fake"
    " CPU tensors.",
    "leaves": "got SystemExit: 3.",
    "number": "expected a module, (module, inputs), (module, inputs, loss), (module, inputs,"
    " loss, targets) or a task, got int.",
    "pair": "got (int, Linear).",
    "wants_images": "Conv2d: expected a module that runs on fake tensors with (int64 [3, 8]), got",
    "two_inputs": "Two: expected a forward that takes (int64 [3, 8]), got missing a required"
    " argument: 'mask'. Give what it takes: a job's function returns (module, inputs).",
    "frozen": "its loss: expected a floating-point result that depends on trained parameters, got"
    " one without a gradient.",
    "lazy": "got lazy modules, whose sizes a first batch would decide.",
    "compiled": "OptimizedModule: expected a module as it is, got a compiled one.",
    "compiled_in_place": "module '1' (Linear): expected a module as it is, got a compiled one."
    " Return it as it is; compile units after sw.apply.",
    "sparse": "module '0' (Embedding): expected a dense gradient, got sparse=True, whose size",
    "loss_of_many": "its loss: expected one number, got a tensor [2, 4].",
    "takes_width": "expected arguments that it takes (width), got missing a required argument",
    "elsewhere": "Embedding, tensor 'weight': expected a tensor on the CPU, where nothing is"
    " allocated for it, got one on 'cuda:0'.",
    "NOT_A_FUNCTION": "expected a function 'NOT_A_FUNCTION' in broken, got int.",
    "nothing": "expected a function 'nothing' in broken, got nothing of that name.",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as compile is imported
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_in_one_line_that_names_it(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as refused:
        recorded(job_of(f"broken:{name}"))
    message = str(refused.value)
    assert message.startswith(f"model.python 'broken:{name}': ")
    assert REFUSED[name] in message
    assert "\n" not in message
    assert capfd.readouterr().err == ""  # torch logs a traceback of its own


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"an importable module 'no_such'.*Run from the folder"):
        recorded(job_of("no_such:model"))


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "shutil:rmtree", "builtins:eval"])
def test_no_function_of_the_standard_library_is_called(name: str) -> None:
    with pytest.raises(
        InputError, match=r"expected a function of your own, got '[\w.]+' of Python"
    ):
        python_function(name, "model.python")


def test_a_module_of_one_s_own_may_be_called_as_one_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chunk.py").write_text("from functools import partial\nbuild = partial(int, 3)\n")
    (tmp_path / "code.py").write_text("def build():\n    return 3\n")
    monkeypatch.delitem(sys.modules, "code", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert python_function("code:build", "model.python")() == 3
    assert python_function("chunk:build", "model.python")() == 3
    monkeypatch.delitem(sys.modules, "code")


def test_untraceable_modules_are_unsupported_and_end_with_the_code_of_bad_input() -> None:
    with pytest.raises(UnsupportedError) as refused:
        recorded(job_of("broken:reads"))
    assert refused.value.exit_code == 2
