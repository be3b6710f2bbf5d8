"""A layout goes out to an engine in that engine's own words, and comes back as the same layout."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from layouts import jobs, read_back
from msgspec.structs import replace

from shardwright.core.document import encode_toml
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.job import megatron
from shardwright.job.engines import accelerate
from shardwright.job.engines.layout import EngineLayout, layout_of
from shardwright.job.engines.own import document_of
from shardwright.job.exported import ENGINES, cannot, exported
from shardwright.job.job import Job, parse_job, read_job
from shardwright.job.parallel import dealt
from shardwright.job.torchtitan import CONFIGS, job_of_flags

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT = 100  # of each engine
READ = [name for name in ENGINES if name != "fsdp2"]
# What the engines' own parsers take, read from their source by the versions that stand in it.
FACTS = json.loads((Path(__file__).parent / "engines.json").read_text())
LLAMA = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14_336, "vocab": 128_256}


def job(**sections: dict[str, Any]) -> Job:
    document: dict[str, Any] = {
        "model": {"kind": "llama"} | LLAMA,
        "cluster": {"compute_device": "cuda", "world_size": 8},
        "batch": {"size": 4, "sequence": 8192},
        "parallel": {},
        "memory": {"runtime": "fsdp2"},
    }
    return parse_job(
        document | {key: document.get(key, {}) | given for key, given in sections.items()}
    )


@cache
def sent(engine: str) -> list[tuple[Job, str]]:
    """Random jobs that it runs, and what they are to it."""
    return [(each, exported(each, engine)) for each in jobs(engine, COUNT)]


@pytest.mark.parametrize("engine", READ)
def test_layouts_come_back_as_they_went_out(engine: str) -> None:
    for each, text in sent(engine):
        whole, found = layout_of(each), layout_of(read_back(engine, text, each))
        assert (said(found), found.samples) == (said(whole), whole.samples)
        assert found.job.batch == each.batch


def test_published_arguments_come_back_as_the_same_job() -> None:
    runs = json.loads((Path(__file__).parents[1] / "published/runs.json").read_text())["megatron"]
    for run in runs:
        ranks = 64 if "release" in run["test"] else 8
        found = parse_job(megatron.job_of(run["flags"], ranks).document)
        text = exported(found, "megatron")
        assert parse_job(megatron.job_of(text, ranks).document) == found
    assert len(runs) == 49


def said(layout: EngineLayout) -> dict[str, Any]:
    """What a layout says, with what the ends weigh as the depth of every stage."""
    found, settings = dict(layout.said), layout.memory.megatron_settings
    if settings:
        for key in megatron.ENDS:
            del found[f"memory.megatron.{key}"]
        stages = layout.degrees.pipeline * layout.degrees.chunks
        found["stages"] = dealt(layout.shape.layers, stages, settings.ends)
    return found


def test_snippets_are_python_without_a_line_too_many() -> None:
    for _, text in sent("fsdp2"):
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        imported = re.findall(r"^from [\w.]+ import (?:\(([^)]*)\)|(.*))", text, re.MULTILINE)
        assert names >= {name for pair in imported for name in re.findall(r"\w+", "".join(pair))}
        assert max(map(len, text.splitlines())) <= 100


def test_settings_of_the_allocator_are_a_comment() -> None:
    memory = {"allocator": "expandable_segments:True", "loss": "chunked"}
    text = exported(job(memory=memory), "torchtitan")
    assert text.startswith("# Set PYTORCH_ALLOC_CONF=expandable_segments:True for it.\n")
    assert job_of_flags(text, None).document["parallel"]["data_shard"] == 8


MEET = "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id"
OF_MEGATRON = {"runtime": "megatron", "loss": "parallel", "implementation": "fused", "zero": 1}


@pytest.mark.parametrize(
    ("engine", "memory"),
    [
        ("torchtitan", {"loss": "chunked"}),
        ("torchtitan-toml", {}),
        ("megatron", OF_MEGATRON),
        ("fsdp2", {}),
        ("accelerate", {"reduce_dtype": "bf16"}),
    ],
)
def test_ranks_of_several_hosts_meet_at_one_of_them(engine: str, memory: dict[str, Any]) -> None:
    one = exported(job(memory=memory), engine)
    assert "HOST" not in one
    assert engine == "accelerate" or "torchrun --nproc-per-node 8 " in one
    whole = job(memory=memory, cluster={"local_world_size": 4})
    text = exported(whole, engine)
    assert text.startswith("# On each of 2 hosts; HOST is the address of the first.\n")
    if engine == "accelerate":
        read = accelerate.parsed(text)
        assert (read["num_machines"], read["num_processes"], read["machine_rank"]) == (2, 8, 0)
        assert (read["main_process_ip"], read["main_process_port"]) == ("HOST", 29_500)
        assert FACTS["accelerate"]["keys"].keys() >= {k for k in read if not k.endswith("config")}
    else:
        assert f"torchrun {MEET} mine " in text.replace(" \\\n#  ", "")
    if engine != "fsdp2":
        assert layout_of(read_back(engine, text, whole)).said == layout_of(whole).said


def flags(text: str, after: str) -> Iterator[tuple[str, list[str]]]:
    """Flags of a command by name, with their values."""
    words = shlex.split(text.replace("\\\n", " "))
    found: list[tuple[str, list[str]]] = []
    for word in words[words.index(after) + 1 :]:
        if word.startswith("--"):
            found.append((word, []))
        elif found and ":" not in word:
            found[-1][1].append(word)
    yield from found


@pytest.mark.parametrize(
    ("engine", "after"), [("torchtitan", "torchtitan.train"), ("megatron", "pretrain_gpt.py")]
)
def test_flags_are_those_of_the_engines_own_parsers(engine: str, after: str) -> None:
    known: dict[str, Any] = FACTS[engine]["flags"]
    for _, text in sent(engine):
        for name, values in flags(text, after):
            plain = re.sub(r"\.no_", ".", name)
            assert plain in known, f"{name} is no flag of {engine}"
            kind = known[plain]
            if kind == "switch":
                assert not values
            else:
                (value,) = values
                assert isinstance(kind, str) or value in kind, f"{name} {value}"
                assert kind != "number" or float(value) is not None


@pytest.mark.parametrize("engine", ["torchtitan-toml", "accelerate"])
def test_keys_are_those_of_the_engines_own_files(engine: str) -> None:
    known: dict[str, Any] = FACTS[engine]["keys"]
    read = tomllib.loads if engine == "torchtitan-toml" else accelerate.parsed
    for _, text in sent(engine):
        for section, keys in read(text).items():
            for key, value in keys.items() if isinstance(keys, dict) else [("", keys)]:
                spot = f"{section}.{key}".rstrip(".")
                assert spot in known
                assert not isinstance(known[spot], list) or value in known[spot], spot


def test_versions_are_those_that_the_facts_are_of() -> None:
    for name, facts in FACTS.items():
        assert facts["commit"][:7] in ENGINES[name].version or facts["commit"] == "v0.2.2"
    assert ENGINES["torchtitan-toml"].version == "0.2.2"


def test_configurations_are_those_of_the_main_branch() -> None:
    found = {
        name: [c.module, c.flavor, c.tokens, c.sequence, c.checkpointing]
        for name, c in CONFIGS.items()
    }
    assert found == FACTS["torchtitan"]["configs"]


def test_a_layout_of_stages_is_as_deep_as_an_estimate_has_them() -> None:
    parallel = {"pipeline": 4, "microbatches": 4, "data_shard": 2}
    memory = {"runtime": "megatron", "loss": "parallel", "implementation": "fused", "zero": 1}
    text = exported(job(parallel=parallel, memory=memory), "megatron")
    assert "--pipeline-model-parallel-layout 'Et*8|t*8|t*8|t*8L'" in text
    other = text.replace("Et*8|t*8", "Et*9|t*7")
    with pytest.raises(UnsupportedError, match=r"layout: expected 'Et\*8.t\*8"):
        megatron.job_of(other, 8)


@pytest.mark.parametrize(
    ("engine", "sections", "said"),
    [
        ("torchtitan", {}, "memory.loss: expected chunked for TorchTitan's main branch (b5bcd76"),
        ("torchtitan", {"model": {"layers": 31}}, "model: expected one of TorchTitan's: llama2 7B"),
        (
            "torchtitan",
            {"parallel": {"pipeline": 8, "schedule": "zbh1", "microbatches": 4}},
            "parallel.schedule: expected gpipe or 1f1b",
        ),
        (
            "torchtitan",
            {"memory": {"loss": "chunked", "float8": True}},
            "memory.float8: expected false, which --config llama3_8b sets and no flag changes, got",
        ),
        ("torchtitan", {"model": {"lora": 4}}, "model: expected one of TorchTitan's"),
        ("fsdp2", {"model": {"lora": 4}}, "model.lora: expected none"),
        (
            "torchtitan-toml",
            {"parallel": {"data_shard": 1, "data_replicate": 8}},
            "parallel.data_shard: expected at least 2",
        ),
        (
            "torchtitan-toml",
            {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b", "chunks": 12}},
            "parallel.chunks: expected stages that 32 layers and both end",
        ),
        ("megatron", {}, "memory.runtime: expected megatron for Megatron-LM"),
        (
            "megatron",
            {
                "model": {"mlp": "gelu", "experts": 8},
                "memory": {"runtime": "megatron", "megatron": {"fp8_param_gather": True}},
            },
            "memory.megatron.bias_activation_fusion: expected false without model.bias",
        ),
        (
            "megatron",
            {
                "model": {"mtp_layers": 1, "positions": 8192},
                "memory": {"runtime": "megatron"},
            },
            "model.positions: expected 'rope' or 'none' beside mtp_layers, got learned ones",
        ),
        (
            "megatron",
            {
                "memory": {
                    "runtime": "megatron",
                    "megatron": {"rms_norm_fusion": False, "cross_entropy_loss_fusion": "te"},
                }
            },
            "memory.megatron.rms_norm_fusion: expected true for Megatron-LM",
        ),
        (
            "megatron",
            {"memory": {"runtime": "megatron", "offload": "states"}},
            "memory.offload: expected none for Megatron-LM",
        ),
        ("fsdp2", {"parallel": {"context": 2}}, "parallel.context: expected 1 for FSDP2"),
        (
            "fsdp2",
            {"parallel": {"tensor": 2}, "model": {"tied_embeddings": True}},
            "model.tied_embeddings: expected none beside parallel.tensor in a snippet, got True",
        ),
        ("accelerate", {}, "memory.reduce_dtype: expected param_dtype bf16, in which Accelerate"),
        ("shardwright", {}, "memory.runtime: expected 'shardwright' for steps"),
    ],
)
def test_what_an_engine_cannot_do_is_one_line(
    engine: str, sections: dict[str, dict[str, Any]], said: str
) -> None:
    found = job(**sections)
    reasons = cannot(found, engine)
    assert any(reason.startswith(said) for reason in reasons), reasons
    assert not any("\n" in reason for reason in reasons)
    with pytest.raises(UnsupportedError) as caught:
        exported(found, engine)
    assert all(reason in str(caught.value) for reason in reasons)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_job_is_written_as_a_document_that_reads_as_equal(example: Path) -> None:
    whole = read_job(example)
    # Tables of a file stand in the document itself.
    whole = replace(whole, model=replace(whole.model, tables=""))
    assert parse_job(tomllib.loads(encode_toml(document_of(whole)))) == whole


def test_a_model_of_which_nothing_is_said_is_written_all_the_same() -> None:
    tables = [{"name": "t", "rows": 10, "dim": 16}]
    plain = parse_job({"model": {"kind": "dlrm"}, "tables": tables})
    assert plain.model.kind == "dlrm"
    assert parse_job(tomllib.loads(encode_toml(document_of(plain)))) == plain


def test_a_key_without_a_row_is_refused_by_every_other_engine() -> None:
    memory = {"runtime": "fsdp2", "fsdp2": {"separate_reduce_scatter_group": True}}
    for engine in ("torchtitan", "torchtitan-toml", "megatron", "fsdp2", "accelerate"):
        reasons = cannot(job(memory=memory), engine)
        assert any(reason.startswith("memory.fsdp2.group: expected false") for reason in reasons)


def test_an_engine_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"engine: expected one of .*got 'megatrom'. Did you mean 'megatron'"
    ):
        exported(job(), "megatrom")


def test_ranks_that_nobody_says_are_asked_for() -> None:
    with pytest.raises(InputError, match=r"cluster\.world_size: expected a number of ranks"):
        cannot(job(cluster={"world_size": None}), "fsdp2")


# ---- what importers read beside what is exported -------------------------------------------------


MAIN = "--module llama3 --config llama3_70b --parallelism.data_parallel_shard_degree 4"


def test_a_configuration_of_main_has_its_own_defaults() -> None:
    found = job_of_flags(MAIN, None).document
    assert found["cluster"]["world_size"] == 32
    assert found["batch"] == {"size": 8, "sequence": 8192}
    assert (found["parallel"]["tensor"], found["memory"]["checkpointing"]) == (8, "full")
    assert (found["memory"]["loss"], found["memory"]["float8"]) == ("chunked", False)


def test_flags_of_main_win_over_its_configuration() -> None:
    more = "--compile.enable --compile.components loss --training.num-tokens-per-train-step=2097152"
    found = job_of_flags(f"{MAIN} {more} activation_checkpoint:selective", None).document
    assert (found["batch"]["size"], found["parallel"]["microbatches"]) == (64, 8)
    assert (found["memory"]["checkpointing"], found["memory"]["compile"]) == ("selective_op", False)


def test_a_script_of_main_is_read_by_its_variables() -> None:
    script = (
        "NGPU=8 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --metrics.log_freq 1 --debug.seed 3"
    )
    found = job_of_flags(script, 8)
    assert found.document["model"]["layers"] == 32
    assert found.harmless == ("metrics", "debug")
    assert found.unread == ("CUDA graphs, for training.disable_cuda_graphs is not set",)
    assert job_of_flags(f"{script} --training.disable_cuda_graphs", 8).unread == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--module llama3 --config llama3_9b", "--config: expected one of llama3_8b, llama3_70b"),
        ("--module qwen3 --config llama3_8b", "--module: expected llama3 of --config llama3_8b"),
        (
            f"{MAIN} activation-checkpoint:memory-budget",
            "activation_checkpoint.mode: expected none",
        ),
        (f"{MAIN} --training.max_context_length 5000", "per_dp_rank: expected a multiple of"),
        (f"{MAIN} --training.dtype bfloat16", "training.dtype: expected float32, got bfloat16"),
        (
            f"{MAIN} --parallelism.pipeline_parallel_degree 4 "
            "--parallelism.pipeline_parallel_layers_per_stage 30",
            "layers_per_stage: expected layers of which 4 ranks have equally many stages, got 30",
        ),
        (
            f"{MAIN} --parallelism.pipeline_parallel_first_stage_less_layers 0",
            "pipeline_parallel_first_stage_less_layers: expected 1, got 0",
        ),
    ],
)
def test_what_cannot_be_followed_of_main_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said).replace("\\ ", " ")):
        job_of_flags(text, None)


YAML = """\
# FSDP2
distributed_type: FSDP   # of torch
mixed_precision: 'no'
num_processes: 4
tpu_env: []
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: True
  fsdp_something: 3
"""


def test_yaml_without_sizes_shares_among_all_processes() -> None:
    found = accelerate.job_of(YAML, job(), None)
    assert found.document["parallel"] == {"data_shard": 4, "microbatches": 1}
    assert found.document["cluster"]["world_size"] == 4
    memory = found.document["memory"]
    assert (memory["checkpointing"], memory["param_dtype"]) == ("full", "fp32")
    assert (found.harmless, found.unread) == (("--tpu_env",), ("fsdp_config.fsdp_something",))
    assert parse_job(found.document).batch == job().batch


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "FSDP\n" if False else "FSDP ",
            "DEEPSPEED ",
            "--distributed_type: expected FSDP, got DEEP",
        ),
        ("version: 2", "version: 1", "fsdp_config.fsdp_version: expected 2, got 1"),
        ("'no'", "fp8", "--mixed_precision: expected no or bf16 or fp16, got fp8"),
        ("something: 3", "offload_params: 3", "fsdp_offload_params: expected true or false, got 3"),
        ("tpu_env: []", "tpu_env:\n- a", "line 6: expected a key and its plain value"),
        (
            "tpu_env: []",
            "parallelism_config:\n  parallelism_config_tp_size: 8",
            "parallelism_config: expected sizes that multiply to the 4 ranks, got 1 x 1 x 8 x 1",
        ),
    ],
)
def test_yaml_that_cannot_be_followed_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        accelerate.job_of(YAML.replace(old, new), job(), None)


def test_all_of_yaml_that_cannot_be_followed_is_named_at_once() -> None:
    wrong = YAML.replace("version: 2", "version: 1").replace("'no'", "fp8")
    with pytest.raises(UnsupportedError) as error:
        accelerate.job_of(wrong.replace("something: 3", "offload_params: 3"), job(), None)
    for said in (
        "fsdp_config.fsdp_version",
        "--mixed_precision",
        "fsdp_config.fsdp_offload_params",
    ):
        assert f"{said}: expected" in str(error.value)
