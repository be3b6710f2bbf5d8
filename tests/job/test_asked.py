"""A question without a file is a job like any other."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.llama import LlamaShape
from shardwright.core.t5 import T5Shape
from shardwright.job.asked import (
    SHORT,
    document_of,
    in_one_line,
    of_same_structure,
    public_model,
    public_models,
)
from shardwright.job.engines import huggingface
from shardwright.job.hf_config import FAMILIES, T5_FAMILIES, read_hf_config
from shardwright.job.job import asked, memory_of, read_job

MODELS = public_models()
OURS = [n for n, m in MODELS.items() if m.config["model_type"] in (*FAMILIES, *T5_FAMILIES)]
OTHERS = sorted(MODELS.keys() - set(OURS))


def t5_parameters(shape: T5Shape) -> int:
    """Attention of every block, twice in a decoder's, its MLP, norms and the bias of distances."""
    inner = shape.heads * shape.head_dim
    attention, mlp = 4 * shape.dim * inner, (2 + shape.gated) * shape.dim * shape.ffn_dim
    encoder = shape.layers * (attention + mlp + 2 * shape.dim)
    decoder = shape.decoder_layers * (2 * attention + mlp + 3 * shape.dim)
    ends = 2 * (shape.buckets * shape.heads + shape.dim)
    return encoder + decoder + ends + shape.vocab * shape.dim * (1 if shape.tied else 2)


@pytest.mark.parametrize("name", OURS)
def test_a_public_model_has_as_many_parameters_as_its_published_files(name: str) -> None:
    shape, model = read_hf_config(name), MODELS[name]
    assert isinstance(shape, LlamaShape | T5Shape)
    built = shape.parameter_count if isinstance(shape, LlamaShape) else t5_parameters(shape)
    assert built == model.parameters - model.beside
    assert bool(model.because) is bool(model.beside)


def test_every_name_says_where_and_when_it_was_published_and_is_its_own() -> None:
    assert len(MODELS) >= 40
    assert len({model.id for model in MODELS.values()}) == len(MODELS)
    for name, model in MODELS.items():
        assert model.id.count("/") == 1
        assert "2018" <= model.date <= "2026"
        assert public_model(name) is public_model(model.id) is model


def test_capitals_dashes_and_owners_do_not_count() -> None:
    known = MODELS["llama3.1-8b"]
    for name in ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "llama3.1-8b", "LLAMA3.1-8B"):
        assert public_model(name) is known


def test_nothing_that_a_configuration_of_the_list_says_is_unread() -> None:
    shapes = [read_hf_config(name) for name in OURS]
    assert not any(s.unread for s in shapes if isinstance(s, LlamaShape))


def test_a_name_is_a_job_of_one_sample_that_reads_back_from_a_file(tmp_path: Path) -> None:
    document = asked("llama3-8b", ["batch.sequence=8192"], "8xH100")
    assert in_one_line(document) == (
        "model.hf_config=llama3-8b batch.size=1 batch.sequence=8192 cluster.preset=h100-8 "
        "cluster.world_size=8"
    )
    job = read_job("llama3-8b", ["batch.sequence=8192"], "8xH100")
    assert job.model.name == "llama3-8b"
    assert memory_of(job).param_dtype == "bf16"
    assert read_job("meta-llama/Llama-3.2-1B").model.name == "Llama-3.2-1B"


def test_a_sample_has_no_more_tokens_than_the_model_was_made_for() -> None:
    lengths = [document_of(name)["batch"]["sequence"] for name in ("gpt2", "llama3.1-8b")]
    assert lengths == [1024, 4096]


def test_a_function_and_a_configuration_are_jobs(tmp_path: Path) -> None:
    assert document_of("models.own:build")["model"] == {"python": "models.own:build"}
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "torch_dtype": "float16"}')
    job = read_job(path)
    assert job.model.shape == read_hf_config(path)
    assert memory_of(job).param_dtype == "fp16"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("Llama-2-7b-chat-hf", "llama2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-3-1b-it", "gemma3-1b"),
        ("llama3.1-8b-instruct", "llama3.1-8b"),
    ],
)
def test_a_model_that_was_trained_further_is_of_the_structure_of_its_base(
    name: str, base: str
) -> None:
    assert document_of(name) == document_of(base)
    with pytest.raises(InputError, match=f"'{base}' has its structure"):
        read_hf_config(name)


@pytest.mark.parametrize(
    "name", ["unsloth/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-Instruct-v0.2", "it", "gpt2"]
)
def test_another_owner_or_version_is_no_such_model(name: str) -> None:
    assert of_same_structure(name) == ""


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text('[model]\nkind = "llama"\nlayers = 2\n')
    assert read_job("gpt2").model.layers == 2


def test_a_folder_is_its_configuration_and_otherwise_does_not_hide_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert read_job("gpt2").model.shape == read_hf_config("gpt2")
    Path("gpt2/config.json").write_text('{"model_type": "llama"}')
    job = read_job("gpt2")
    assert (job.model.name, job.model.shape) == ("gpt2", read_hf_config("gpt2/config.json"))
    Path("mine").mkdir()
    with pytest.raises(InputError, match="mine: expected a job file, got a directory"):
        read_job("mine")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3-9b", "Did you mean 'llama3-8b'"),
        ("qwen3-8", "Did you mean 'qwen3-8b'"),
        (
            "qwen3-8",
            "expected a job file, a public model, a config.json or package.module:function",
        ),
        ("none.toml", "none.toml: expected a job file, got no such file."),
        ("none.json", "none.json: expected a model configuration file, got no such file."),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        read_job(name)
    assert said in str(refused.value)


def test_a_job_may_name_a_public_model_and_a_misspelt_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nhf_config = "gemma3-1b"\n')
    shape = read_job(path).model.shape
    assert isinstance(shape, LlamaShape)
    assert (shape.qk_norm, shape.post_norms, shape.sliding_window) == (True, True, 512)
    with pytest.raises(InputError, match="Did you mean 'gemma3-1b'"):
        read_job(path, ["model.hf_config=gemma3-1c"])


def test_gpt_2_has_positions_biases_and_dropout() -> None:
    shape = read_hf_config("gpt2")
    assert isinstance(shape, LlamaShape)
    assert (shape.positions, shape.layer_norm, shape.ungated) == (1024, True, True)
    assert (shape.attention_bias, shape.output_bias, shape.mlp_bias) == (True, True, True)
    assert (shape.dropout, shape.attention_dropout, shape.ffn_dim) == (0.1, 0.1, 3072)


# What peft says of a rank of 16 beside q, k, v, o, gate, up and down (`print_trainable_parameters`
# of Llama 3 8B, as published with many trainings of it; read in November 2026).
@pytest.mark.parametrize(
    ("name", "rank", "trained", "all_of_them"),
    [("llama3-8b", 16, 41_943_040, 8_072_204_288), ("llama3-8b", 64, 167_772_160, 8_198_033_408)],
)
def test_adapters_have_as_many_numbers_as_of_peft(
    name: str, rank: int, trained: int, all_of_them: int
) -> None:
    shape = read_job(name, [f"model.lora={rank}"]).model.shape
    assert isinstance(shape, LlamaShape)
    assert (shape.trained_count, shape.parameter_count) == (trained, all_of_them)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "mixtral-8x7b", "gemma2-9b", "gpt2"])
def test_adapters_are_of_every_layer_of_attention_and_mlp(name: str) -> None:
    config, rank = public_models()[name].config, 8
    shape = read_job(name, [f"model.lora={rank}"]).model.shape
    assert isinstance(shape, LlamaShape)
    dim = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config["n_head"]
    inside = heads * config.get("head_dim", dim // heads)
    keys = inside // heads * config.get("num_key_value_heads", heads)
    wide = config.get("intermediate_size", 4 * dim)
    ends = 2 * (dim + inside) + 2 * (dim + keys)
    if name != "mixtral-8x7b":  # whose experts have none
        ends += (2 if name == "gpt2" else 3) * (dim + wide)
    assert shape.trained_count == shape.layers * rank * ends


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("llama3-8b", {"parallel.tensor": "2"}, "none beside memory.runtime 'megatron' or"),
        ("deepseek-v2-lite", {}, "none beside kv_lora_rank"),
        ("t5-small", {}, "no other key of [model] beside a configuration"),
        ("llama3-8b", {"model.lora": "0"}, "int >= 1"),
    ],
)
def test_adapters_are_refused_where_layers_have_none(
    name: str, keys: dict[str, str], said: str
) -> None:
    given = [f"{key}={value}" for key, value in ({"model.lora": "16"} | keys).items()]
    with pytest.raises(InputError, match=re.escape(said)):
        read_job(name, given, "8xH100")


def test_every_short_option_is_a_key_of_a_job() -> None:
    values = {"optimizer": "sgd", "runtime": "fsdp2", "checkpointing": "full", "dtype": "bf16"}
    values |= {"offload": "none", "zero": "3"}
    given = [f"{key}={values.get(name, '1')}" for name, key in SHORT.items()]
    job = read_job("llama3-8b", given, "8xH100")
    assert (job.batch.sequence, memory_of(job).runtime, job.train.optimizer) == (1, "fsdp2", "sgd")


@pytest.mark.skipif(find_spec("transformers") is not None, reason="it is built there")
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_transformers_is_refused_with_what_to_install(name: str) -> None:
    with pytest.raises(UnsupportedError, match="Install transformers, which builds it"):
        read_job(name)


def test_the_documentation_lists_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    part = text.partition("Names, whose")[2].partition("A `config.json` of any other")[0]
    listed = re.findall(r"`([a-z0-9.-]+)`", part)
    assert [name for name in listed if name != "transformers"] == list(MODELS)


def test_an_imported_gpt2_has_no_more_tokens_than_positions() -> None:
    config = public_models()["gpt2"].config | {"n_positions": 512}
    config.pop("max_position_embeddings", None)
    assert huggingface.job_of(config, "config.json", None).document["batch"]["sequence"] == 512
