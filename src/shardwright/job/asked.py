"""What a command is asked about: a job file, or what stands for one, such as the name of a public
model. Both are the document of a job, and short options are keys of it.
"""

# A name that builds another model than the published one would be answered as if it did not, so a
# test holds every entry of the list to the number of its parameters. A file wins over a name: who
# has a file `gpt2` means that one.

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.document import convert, parse_json, parse_toml, read_bytes
from shardwright.core.errors import InputError, did_you_mean, expected
from shardwright.core.tensor import TORCH_NAMES

LIST = "public_models.toml"
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# Options of every command and keywords of every call that take a model, and the keys they set.
SHORT = {
    "batch": "batch.size",
    "seq": "batch.sequence",
    "dtype": "memory.param_dtype",
    "optimizer": "train.optimizer",
    "runtime": "memory.runtime",
    "lora": "model.lora",
    "checkpointing": "memory.checkpointing",
    "zero": "memory.zero",
    "offload": "memory.offload",
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "cp": "parallel.context",
    "ep": "parallel.expert",
}
LONGEST = 4096  # tokens of a sample where nobody names them, unless the model was made for fewer
A_JOB = "Name a job in TOML, such as examples/demo.toml."
TUNED = ("instruct", "it", "chat", "base", "pt")  # as owners name what they trained further
POSITIONS = ("max_position_embeddings", "n_positions")


class PublicModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that was published as ``id`` on a ``date``: what its ``config.json`` says, but for
    its ``nulls``, and how many numbers its files have, ``beside`` of which are no parameters,
    ``because`` of what."""

    id: str
    date: str
    parameters: int
    config: dict[str, Any]
    beside: int = 0
    because: str = ""
    nulls: tuple[str, ...] = ()  # TOML has no word for them


@cache
def public_models() -> dict[str, PublicModel]:
    """All of them, by the names that commands take."""
    text = resources.files("shardwright.job").joinpath(LIST).read_text(encoding="utf-8")
    read = parse_toml(text, LIST, "a list of models")
    return {name: convert(each, PublicModel, LIST, name) for name, each in read.items()}


def public_model(name: str) -> PublicModel | None:
    """The model of a name, or of its ``id`` with or without the owner; capitals, dashes and dots
    do not count."""
    wanted, models = _plain(name), public_models()
    by = {_plain(each): model for each, model in models.items()}
    for model in models.values():
        by.setdefault(_plain(model.id), model)
        by.setdefault(_plain(model.id.partition("/")[2]), model)
    return by.get(wanted)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())


def of_same_structure(name: str) -> str:
    """The public model that was trained further to be, or from, the one that ``name`` is, such as
    ``meta-llama/Llama-3.1-8B-Instruct``: its name here; empty where there is none."""
    if public_model(name):
        return ""
    wanted = _untuned(name)
    for known, model in public_models().items():
        if wanted in map(_untuned, (known, model.id, model.id.partition("/")[2])):
            return known
    return ""


def _untuned(name: str) -> str:
    """A plain name without words that say how it was trained further."""
    owner, slash, rest = name.lower().rpartition("/")
    return _plain(owner + slash + "".join(w for w in rest.split("-") if w not in TUNED))


def misspelled(name: str) -> str:
    """The name that may have been meant, as a question; without one like it, how names look."""
    if same := of_same_structure(name):
        return f"'{same}' has its structure."
    near = did_you_mean(name.lower(), public_models())
    return near or "Public models have names such as llama3-8b."


def config_name(config: str) -> str:
    """What people call the model of a ``config.json``, or a public one, as it is named."""
    path = Path(config)
    if path.suffix != ".json":
        return path.name
    return path.parent.name if path.stem == "config" else path.stem


def config_document(path: Path | str) -> dict[str, Any]:
    """What a ``config.json`` says, or that of a public model where there is no such file."""
    if not Path(path).is_file() and (known := public_model(str(path))):
        return {**known.config, **dict.fromkeys(known.nulls)}
    is_file = Path(path).suffix == ".json"
    remedy = "Name the config.json of a model." if is_file else misspelled(str(path))
    raw = read_bytes(path, "model configuration", remedy)
    document: Any = parse_json(raw, str(path), "a config.json")
    if not isinstance(document, dict):
        raise InputError(expected(str(path), "a JSON object", type(document).__name__))
    return document


DTYPES = {TORCH_NAMES[name]: name for name in ("bf16", "fp16", "fp32")}


def said_dtype(config: Mapping[str, Any]) -> Any:
    """What a configuration says that its model computes in, by our name where there is one; empty
    where it says nothing. transformers 4.56 renamed the key."""
    said = config.get("dtype") or config.get("torch_dtype") or ""
    return DTYPES.get(str(said).removeprefix("torch."), said)


def tokens_of(config: Mapping[str, Any], otherwise: int) -> int:
    """Tokens of a sample where nobody names them: ``LONGEST``, or the positions that the model was
    made for where these are fewer; of ``otherwise`` positions where it names none."""
    return min(max(positions_of(config) or otherwise, 1), LONGEST)


def positions_of(config: Mapping[str, Any]) -> int:
    """The positions that a model was made for; 0 where its configuration names none."""
    return next((config[key] for key in POSITIONS if isinstance(config.get(key), int)), 0)


def document_of(model: Path | str) -> dict[str, Any]:
    """The document of a job: of its file, or with one sample on a rank of what stands for one: a
    public model's name, a ``config.json`` or its folder, or ``package.module:function``."""
    name = str(model)
    there = not isinstance(model, str | os.PathLike) or Path(model).exists()
    if there and Path(name).is_dir():
        if (Path(name) / "config.json").is_file():
            return document_of(Path(name) / "config.json")
        there = public_model(name) is None  # a folder that has the name by chance
    if there or Path(model).suffix == ".toml":
        raw = read_bytes(model, "job", A_JOB)
        # By what is in it: a job may have any name, and TOML does not begin with a brace.
        config = config_document(model) if raw.lstrip().startswith(b"{") else {}
        if "model_type" not in config:  # a plan, perhaps
            return parse_toml(raw, name, "a job")
    elif FUNCTION.fullmatch(name):
        return {"model": {"python": name}, "batch": {"size": 1}}
    elif public_model(name) or Path(model).suffix == ".json":
        config = config_document(model)
    elif same := of_same_structure(name):
        return document_of(same)
    else:
        wanted = "a job file, a public model, a config.json or package.module:function"
        raise InputError(expected(name, wanted, "no such file", misspelled(name)))
    batch = {"size": 1, "sequence": tokens_of(config, otherwise=1)}
    return {"model": {"hf_config": name}, "batch": batch}


def in_one_line(document: Mapping[str, Any], inside: str = "") -> str:
    """A document as ``section.key=value``, one after the other, as ``--set`` takes them."""
    return " ".join(
        in_one_line(value, f"{inside}{key}.")
        if isinstance(value, Mapping)
        else f"{inside}{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in document.items()
    )
