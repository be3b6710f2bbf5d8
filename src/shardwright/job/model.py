"""The ``[model]`` of a job: the kinds of models, a row each, and the widths of their layers.

A kind is a short form for people. What it means is said here alone: a row of ``KINDS`` has the
keys it reads and its traits, ``with_kind`` fills in what it implies, and every other file asks the
traits of a section and never its name (but to name it in a sentence).
"""
# The section is one flat struct for all kinds, though each reads few of its keys: plans embed their
# job with the widths of the first three kinds, and its bytes, and their fingerprint, must stay. So
# keys that came later are UNSET, and not written, where a job does not have them.

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, expected, there_are
from shardwright.core.llama import (
    LATENT,
    LLAMA_EXPERTS,
    Activation,
    LlamaShape,
    Share,
    check_shape,
)
from shardwright.core.t5 import T5Shape
from shardwright.job.asked import config_name
from shardwright.job.hf_config import Shape, read_hf_config

Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Words = Annotated[int, msgspec.Meta(ge=1, le=2**24)]

OURS = "shardwright.models."
# Kinds that are calls of functions of ours, a file each; the other keys of [model] are arguments.
# Nothing below knows them: a job has the call, and what works for a user's module works for it.
CALLS = {"t5": "t5:build", "transformers": "hf:build"}
_STREAM = ("layers", "dim", "heads", "ffn_dim", "vocab")
_LLAMA = (
    *("kv_heads", "head_dim", "tied_embeddings", "qk_norm", "attention_bias", "norm", "mlp"),
    *("positions", "bias", "dropout", "attention_dropout", "mtp_layers", "experts"),
    *("experts_per_token", "expert_ffn_dim", "shared_ffn_dim", "moe_layers", *LATENT),
)
WIDTHS = (*_STREAM, *_LLAMA)
_DEGREES = ("pipeline", "schedule", "chunks", "expert", "routing", "expert_load")


class ModelTraits(msgspec.Struct, frozen=True):
    """What holds of every model of a kind.

    ``keys`` are those of ``[model]`` that it reads. ``source`` says which batches train it: rows of
    click logs, text, or what a ``function`` of the user's own gives beside the module; nothing
    trains tables alone. ``lists_tables`` is whether they stand in the job, ``has_blocks`` whether
    parts may be checkpointed. One that ``is_estimated`` computes in the dtypes of ``[memory]`` and
    learns with AdamW by default, and its memory is known where no plan follows the job.
    ``divided_by`` are keys of ``[parallel]``, beside those of data ranks, that divide it, and
    ``experts`` the modules of which ``expert`` does. ``template`` is what ``init`` writes for it.
    """

    keys: tuple[str, ...]
    source: Literal["clicks", "text", "function", "none"]
    lists_tables: bool = False
    has_blocks: bool = True
    is_estimated: bool = False
    divided_by: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    template: str = ""

    @property
    def has_step(self) -> bool:
        """Whether there is a step to plan and train, not tables alone."""
        return self.source != "none"

    @property
    def reads_clicks(self) -> bool:
        """Whether a rank reads rows of click logs, and its tables are modules of a DLRM."""
        return self.source == "clicks"

    @property
    def reads_text(self) -> bool:
        """Whether a sample is so many tokens and as many targets."""
        return self.source == "text"

    @property
    def is_function(self) -> bool:
        """Whether a function of the user's own gives the module, its batch and its loss, so that
        only it knows what they are."""
        return self.source == "function"


ModelKind = Literal["dlrm", "transformer", "tables", "llama", "python"]
KINDS: dict[str, ModelTraits] = {
    "dlrm": ModelTraits(
        ("dense_features", "bottom", "top", "interaction", "cross_layers", "cross_rank"),
        "clicks",
        lists_tables=True,
        has_blocks=False,
        template="a DLRM on click logs, to be planned and trained",
    ),
    "transformer": ModelTraits(_STREAM, "text"),
    "llama": ModelTraits(
        (*WIDTHS, "hf_config", "lora"),
        "text",
        is_estimated=True,
        divided_by=("tensor", "context", "sequence", "expert_tensor", *_DEGREES),
        experts=LLAMA_EXPERTS,
        template="a llama on text, to be planned and trained",
    ),
    "python": ModelTraits(
        ("python", "arguments"),
        "function",
        is_estimated=True,
        divided_by=("tensor", "parallelize_plan", *_DEGREES),
        template="a module of your own, with a Python file to put it into",
    ),
    "tables": ModelTraits(
        ("python", "arguments"),  # the dense part, to be traced
        "none",
        lists_tables=True,
        has_blocks=False,
        template="embedding tables alone, to be planned",
    ),
}
# Only keys that one kind alone reads for building a model; `tables` reads `python` too, but for its
# dense part, and has to name itself.
IMPLIED: dict[str, ModelKind] = {"hf_config": "llama", "python": "python"}  # by a key alone


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The built-in model and the widths of its layers, or tables alone, perhaps from a file.

    A job that names neither layers nor ``[data]`` nor ``[train]`` is of tables alone. ``shape`` is
    what its widths or its ``hf_config`` come to.

    Attributes:
        kind: ``"dlrm"``, or ``"transformer"``: a small GPT without tables; ``"tables"``: tables to
            be planned, nothing to be trained; ``"llama"``; ``"t5"``: an encoder and a
            decoder, whose sizes stand beside it by the names of ``T5Shape``; ``"python"``: [a model
            of your own](own-model.md)
        tables: a JSON file of tables instead of ``[[tables]]``, see below
        dense_features: width of the dense input
        bottom: widths of the bottom MLP; the last is the tables' ``dim``
        top: widths of the top MLP; the last is 1 to train on clicks
        interaction: ``"dot"``: products of all pairs; ``"cat"``: concatenation; ``"dcn"``: the
            cross network of DCN v2 on the concatenation
        cross_layers, cross_rank (3, 512): of ``"dcn"``: its layers, and the inner width of each
        layers, dim, heads: of a transformer or a llama: blocks, width of the stream, heads of
            attention, which divide ``dim``
        ffn_dim (4 times ``dim``): of a transformer or a llama: width inside a block's MLP
        vocab: of a transformer or a llama: tokens that it knows; 256 or more for text, whose bytes
            are the tokens
        kv_heads, head_dim (``heads``, ``dim`` / ``heads``): of a llama: heads of keys and values,
            width of a head
        tied_embeddings, qk_norm, attention_bias (``false``): of a llama: the head is the embedding;
            norms of queries and keys; biases of queries, keys and values
        experts, experts_per_token (none, 2): of a llama: experts instead of an MLP, and how many a
            token is sent to
        expert_ffn_dim, shared_ffn_dim (``ffn_dim``, none): of a llama with experts: width of each,
            and of one that sees every token
        norm, mlp (``"rmsnorm"``, ``"swiglu"``): of a llama: or ``"layernorm"``; or ``"geglu"``, and
            of two matrices ``"gelu"``, ``"squared_relu"``
        positions (``"rope"``): of a llama: ``"none"``, or how many are learned
        bias (``false``): of a llama: biases of all linear layers but router and head
        dropout, attention_dropout (0): of a llama: of the embedding and of what a block adds to the
            stream; of shares of attention
        mtp_layers (none): of a llama with ``memory.runtime = "megatron"``: blocks behind the last,
            each of which predicts one token more (multi-token prediction)
        moe_layers (all): of a llama with experts: the layers that have them, counted from 0
        kv_lora_rank, q_lora_rank, qk_rope_head_dim, v_head_dim (none): of a llama with latent
            attention, as DeepSeek's configuration names them: numbers that make keys and values,
            and queries; the part of ``head_dim`` that is turned; width of a head of values, by
            default ``head_dim``
        lora (none): of a llama: all is frozen, and stays in the dtype that is computed in, but
            adapters (LoRA) of so many inner numbers beside the linear layers of attention and of
            MLPs; experts, router and head have none. Also beside ``hf_config``
        hf_config: instead of a llama's widths the name of [a public
            model](memory.md#a-question-without-a-file), or the ``config.json`` of a Hugging Face
            model (llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, gemma, gemma2,
            gemma3_text, gpt2, gpt_oss, phi3, deepseek_v2, deepseek_v3, t5, mt5; [what
            they leave out](memory.md#hugging-face-configurations)), found from the working
            directory, else beside the job. What the widths or the file come to stays with the job
            as ``shape``
        python, arguments: a module of your own, as ``"package.module:function"``, and a table of
            keywords for the function, see below
    """

    kind: ModelKind = "dlrm"
    tables: str = ""
    dense_features: Width = 13
    bottom: tuple[Width, ...] = (64, 16)
    top: tuple[Width, ...] = (64, 1)
    interaction: Literal["dot", "cat", "dcn"] = "dot"
    layers: Depth = 4
    dim: Width = 128
    heads: Width = 4
    ffn_dim: Width | None = None
    vocab: Words = 256
    cross_layers: Depth | UnsetType = UNSET
    cross_rank: Width | UnsetType = UNSET
    kv_heads: Width | UnsetType = UNSET
    head_dim: Width | UnsetType = UNSET
    tied_embeddings: bool | UnsetType = UNSET
    qk_norm: bool | UnsetType = UNSET
    attention_bias: bool | UnsetType = UNSET
    experts: Width | UnsetType = UNSET
    experts_per_token: Width | UnsetType = UNSET
    expert_ffn_dim: Width | UnsetType = UNSET
    shared_ffn_dim: Width | UnsetType = UNSET
    moe_layers: tuple[int, ...] | UnsetType = UNSET
    q_lora_rank: Width | UnsetType = UNSET
    kv_lora_rank: Width | UnsetType = UNSET
    qk_rope_head_dim: Width | UnsetType = UNSET
    v_head_dim: Width | UnsetType = UNSET
    norm: Literal["rmsnorm", "layernorm"] | UnsetType = UNSET
    mlp: Literal["swiglu", "geglu", "gelu", "squared_relu"] | UnsetType = UNSET
    positions: Literal["rope", "none"] | Width | UnsetType = UNSET
    bias: bool | UnsetType = UNSET
    dropout: Share | UnsetType = UNSET
    attention_dropout: Share | UnsetType = UNSET
    mtp_layers: Width | UnsetType = UNSET
    lora: Width | UnsetType = UNSET
    hf_config: str | UnsetType = UNSET
    python: str | UnsetType = UNSET
    arguments: dict[str, Any] | UnsetType = UNSET
    shape: LlamaShape | UnsetType = UNSET

    @property
    def traits(self) -> ModelTraits:
        """What holds of its kind."""
        return KINDS[self.kind]

    @property
    def name(self) -> str:
        """What people call the model: its function, its Hugging Face config, else its kind."""
        if self.python is not UNSET:
            if (config := self.of_transformers) and "_name_or_path" in config:
                return config_name(str(config["_name_or_path"])) or self.kind
            own = self.python.removeprefix(OURS)
            mine = own == self.python
            return own.replace(":", ".") if mine else own.partition(":")[0]
        if self.hf_config is not UNSET:
            return config_name(self.hf_config) or self.kind
        return self.kind

    @property
    def of_transformers(self) -> dict[str, Any]:
        """The configuration of a model that ``transformers`` builds; empty for others."""
        found = self.arguments or {}
        config = found.get("config") if self.python == OURS + CALLS["transformers"] else None
        return config if isinstance(config, dict) else {}


def with_kind(
    model: dict[str, Any],
    is_run: bool = True,
    where: str = "job",
    job_path: Path | None = None,
) -> dict[str, Any]:
    """A decoded section with the kind that its keys imply: tables alone where it has no others and
    the job is not one that ``is_run``. A kind of ``CALLS`` becomes its call, and so does a
    configuration of such a model."""
    if "kind" not in model and isinstance(model.get("hf_config"), str) and len(model) == 1:
        found = _config(model["hf_config"], where, job_path)
        if isinstance(found, T5Shape):
            model = {"kind": "t5", **_changed(found)}
        elif isinstance(found, dict):
            found = {**found, "_name_or_path": model["hf_config"]}
            model = {"kind": "transformers", "config": found}
    named = model.get("kind")
    if isinstance(named, str) and named in CALLS:
        arguments = {key: value for key, value in model.items() if key != "kind"}
        return {"kind": "python", "python": OURS + CALLS[named], "arguments": arguments}
    kind = next((IMPLIED[key] for key in IMPLIED if key in model), None)
    # A job that says nothing of a run is of tables alone. With [data] or [train] the same section
    # is a DLRM with its default layers.
    if set(model) <= {"tables"} and not is_run:
        kind = "tables"
    return {"kind": kind, **model} if kind else model


def as_function(model: ModelSection) -> ModelSection:
    """What its function gives, alone."""
    return ModelSection(kind=IMPLIED["python"], python=model.python, arguments=model.arguments)


def traits_of(model: Any) -> ModelTraits | None:
    """Those of a decoded section; None where it names no kind that there is."""
    kind = model.get("kind", ModelSection().kind) if isinstance(model, dict) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


def completed(model: ModelSection, where: str, job_path: Path | None) -> ModelSection:
    """The section with the shape of its llama; InputError where keys contradict one another."""
    if model.traits.is_function or model.python is not UNSET:
        check_function(model.python, f"{where}: model.python", "a module")
    if "hf_config" not in model.traits.keys:  # which a LlamaShape has no room for
        return model
    if model.hf_config is UNSET:
        shape = _llama_shape(model, where)
        check_shape(shape, f"{where}: model")
    else:
        found = _config(model.hf_config, where, job_path)
        if not isinstance(found, LlamaShape):
            wanted = "no other key of [model] beside a configuration of a model that is no decoder"
            raise InputError(expected(f"{where}: model", wanted, "one"))
        shape = msgspec.structs.replace(found, lora=model.lora) if model.lora else found
        check_shape(shape, f"{where}: model")
    return msgspec.structs.replace(model, shape=shape)


def _llama_shape(model: ModelSection, where: str) -> LlamaShape:
    if model.head_dim is UNSET and model.dim % model.heads:
        raise InputError(
            expected(
                f"{where}: model.heads",
                f"a divisor of dim {model.dim}, or model.head_dim beside it",
                str(model.heads),
            )
        )
    wide = model.ffn_dim or 4 * model.dim
    experts = _given(model.experts, 0)
    if not experts:
        for name in ("experts_per_token", "expert_ffn_dim", "shared_ffn_dim", "moe_layers"):
            if getattr(model, name) is not UNSET:
                raise InputError(
                    expected(f"{where}: model.experts", f"at least 1 beside {name}", "none")
                )
    layers = tuple(range(model.layers)) if experts else ()
    bias, (activation, _) = _given(model.bias, False), MLPS[_given(model.mlp, "swiglu")]
    return LlamaShape(
        layers=model.layers,
        dim=model.dim,
        heads=model.heads,
        kv_heads=_given(model.kv_heads, model.heads),
        head_dim=_given(model.head_dim, model.dim // model.heads),
        ffn_dim=wide,
        vocab=model.vocab,
        tied_embeddings=_given(model.tied_embeddings, False),
        qk_norm=_given(model.qk_norm, False),
        attention_bias=_given(model.attention_bias, False) or (bias and not model.kv_lora_rank),
        output_bias=bias,
        mlp_bias=bias,
        experts=experts,
        experts_per_token=_given(model.experts_per_token, min(2, experts)),
        expert_ffn_dim=_given(model.expert_ffn_dim, wide) if experts else 0,
        shared_ffn_dim=_given(model.shared_ffn_dim, 0),
        moe_layers=_given(model.moe_layers, layers),
        activation=activation,
        **{key: _given(getattr(model, key), 0) for key in LATENT},
        **_unlike_llama(model),
    )


# By the name of an MLP: its activation, and whether that is of a gate.
MLPS: dict[str, tuple[Activation, bool]] = {
    "swiglu": ("silu", True),
    "geglu": ("gelu_tanh", True),
    "gelu": ("gelu_tanh", False),
    "squared_relu": ("squared_relu", False),
}


def _unlike_llama(model: ModelSection) -> dict[str, Any]:
    """What no llama has, alone: a plan of one is written as before there were these keys."""
    found = {
        "layer_norm": model.norm == "layernorm",
        "ungated": not MLPS[_given(model.mlp, "swiglu")][1],
        "positions": UNSET if model.positions == "rope" else model.positions,
        "dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "mtp_layers": model.mtp_layers,
        "lora": model.lora,
    }
    return {key: value for key, value in found.items() if value}


def cross_of(model: ModelSection) -> tuple[int, int]:
    """Layers and rank of a DCN v2's cross network."""
    return _given(model.cross_layers, 3), _given(model.cross_rank, 512)


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is UNSET else value


def _changed(shape: T5Shape) -> dict[str, Any]:
    """What is not by default."""
    usual = msgspec.to_builtins(T5Shape())
    # Only what differs: the arguments stand in the plan's job, and a default that is added later
    # must not change it.
    return {k: v for k, v in msgspec.to_builtins(shape).items() if v != usual[k]}


def check_function(name: str | UnsetType, where: str, returns: str = "batches") -> None:
    """InputError unless ``name`` has the form of a function of the user's own."""
    if name is UNSET or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        raise InputError(
            expected(
                where,
                f"'package.module:function' of a function that returns {returns}",
                "none" if name is UNSET else repr(name),
            )
        )


def beside(name: str, job_path: Path | None, key: str = "", least: int = 0) -> Path:
    """Where a file is found: from the working directory, else beside the job. InputError for what
    is no name; one of less than ``least`` characters is none, either."""
    if "\0" in name or len(name) < least:
        raise InputError(expected(key, "the name of a file", repr(name)))
    # Looked for from the working directory first, as a shell would; a job that is moved together
    # with its files is found beside itself.
    path = Path(name)
    if not path.exists() and job_path is not None and (job_path.parent / path).exists():
        path = job_path.parent / path
    return path


def _config(model: str, where: str, job_path: Path | None) -> Shape:
    return read_hf_config(beside(model, job_path, f"{where}: model.hf_config", 1))


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_defined(name: str, where: str) -> None:
    """InputError unless ``package.module:function`` can be imported from the working directory or
    is installed, and its file has the function. What a file makes as it runs is not looked for."""
    path, _, function = name.partition(":")
    # The launcher must not import a user's module: it may start devices, or take minutes. So its
    # source is read for the name, and what only running it would show is left to the ranks.
    if path in sys.modules:  # it says itself what it has
        return
    spec = _spec_of(path)
    if spec is None:
        wanted, remedy = f"an importable module '{path}'", "Run from the folder that holds it."
        raise InputError(expected(where, wanted, "none of that name", remedy))
    # A built-in or compiled module has no source to look at.
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever imports it says why
        return
    names = list(_names(tree))
    if function.partition(".")[0] in names or {"*", "__getattr__"}.intersection(names):
        return
    own = [node.name for node in tree.body if isinstance(node, SCOPES)]
    wanted, remedy = f"a function '{function}' in {path}", there_are(function, own)
    raise InputError(expected(where, wanted, "nothing of that name", remedy))


def _spec_of(path: str) -> ModuleSpec | None:
    """Where a module is, as importing it from the working directory would find it."""
    # A file that was written a moment ago (by `init`, or a notebook) is not in the finders' caches.
    invalidate_caches()
    # Not find_spec on the whole path: it imports the packages above, which is running a user's
    # code.
    places, spec = [str(Path.cwd()), *sys.path], None
    for part in path.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None and spec is None:  # an installed one may have a finder of its own
            with suppress(ImportError, ValueError):
                found = find_spec(part)
        if found is None:
            return None
        spec, places = found, list(found.submodule_search_locations or ())
    return spec


def _names(tree: ast.AST) -> Iterator[str]:
    """What a file's own scope has names for, however they come; ``*`` for all of another's."""
    # Into `if` and `try`, too, but not into functions and classes, whose names are their own.
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, SCOPES):
            yield node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        yield from _names(node)
