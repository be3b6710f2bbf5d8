"""The shape of a decoder or a T5 from the ``config.json`` of a Hugging Face model, no weights.

A key that is missing has the default of the model's configuration class (transformers 4.57), for
such files leave defaults out.
"""

# A key that is misread gives a model that is planned well and is another one: nobody would notice
# before its weights are loaded. So defaults are those of each class, number by number, a test holds
# parameter counts to published weights, keys that may change the model and that nobody reads are
# told, and what is known to be another model is refused.

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.llama import LlamaShape, check_shape
from shardwright.core.t5 import T5Shape
from shardwright.job.asked import DTYPES, config_document, said_dtype
from shardwright.job.hf_reader import Reader


class Defaults(msgspec.Struct, frozen=True):
    """What a configuration class says where the file says nothing, and what it never asks.

    ``kv_heads`` and ``head_dim`` of 0 follow from the heads. ``biased`` is a bias of queries, keys
    and values whatever the file says; ``bias_key`` is the key that decides, for the output
    projection too where ``output_follows``. ``fixed`` are fields of the shape that no file has a
    key for. A ``latent`` attention has widths of its own, ``LATENT`` where the file has none.
    Experts that see every token have a width (``shared_ffn_dim``) or are so many of a routed one's
    (``shared_experts``); the first ``dense_layers`` have none.
    """

    vocab: int
    dim: int
    ffn_dim: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    window: int | None = None
    window_key: str = ""
    biased: bool = False
    bias_key: str = ""
    output_follows: bool = False
    mlp_bias_key: str = ""
    logit_cap: float = 0.0
    attention_cap: float = 0.0
    fixed: dict[str, Any] = {}
    latent: bool = False
    experts_key: str = ""
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_dim: int = 0
    shared_ffn_dim: int = 0
    shared_experts: int = 0
    dense_layers: int = 0


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
Q_LORA_RANK, UNTURNED = 1536, 128  # of the same classes
_BIASED: dict[str, Any] = {"bias_key": "attention_bias", "output_follows": True}
_QWEN: dict[str, Any] = {"window_key": "use_sliding_window"}
_QWEN3: dict[str, Any] = {**_QWEN, **_BIASED, "fixed": {"qk_norm": True}}
_GEMMA = {"activation": "gelu_tanh", "scaled_embedding": True}
_DEEPSEEK: dict[str, Any] = {"latent": True, "experts_key": "n_routed_experts"}
FAMILIES: dict[str, Defaults] = {
    "llama": Defaults(32000, 4096, 11008, 32, 32, mlp_bias_key="mlp_bias", **_BIASED),
    "mistral": Defaults(32000, 4096, 14336, 32, 32, 8, window=4096),
    "mixtral": Defaults(
        *(32000, 4096, 14336, 32, 32, 8),
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
        experts_key="num_local_experts",
        experts=8,
        experts_per_token=2,
    ),
    "qwen2": Defaults(151936, 4096, 22016, 32, 32, 32, biased=True, **_QWEN),
    "qwen3": Defaults(151936, 4096, 22016, 32, 32, 32, head_dim=128, **_QWEN3),
    "qwen2_moe": Defaults(
        *(151936, 2048, 5632, 24, 16, 16),
        biased=True,
        bias_key="qkv_bias",
        experts_key="num_experts",
        experts=60,
        experts_per_token=4,
        expert_ffn_dim=1408,
        shared_ffn_dim=5632,
        **_QWEN,
    ),
    "qwen3_moe": Defaults(
        *(151936, 2048, 6144, 24, 32, 4),
        experts_key="num_experts",
        experts=128,
        experts_per_token=8,
        expert_ffn_dim=768,
        **_QWEN3,
    ),
    "gemma": Defaults(
        *(256000, 3072, 24576, 28, 16, 16),
        head_dim=256,
        tied=True,
        fixed=_GEMMA,
        **_BIASED,
    ),
    "gemma2": Defaults(
        *(256000, 2304, 9216, 26, 8, 4),
        head_dim=256,
        tied=True,
        window=4096,
        logit_cap=30.0,
        attention_cap=50.0,
        fixed={**_GEMMA, "post_norms": True},
        **_BIASED,
    ),
    "gemma3_text": Defaults(
        *(262208, 2304, 9216, 26, 8, 4),
        head_dim=256,
        rope_theta=1_000_000.0,
        tied=True,
        window=4096,
        fixed={**_GEMMA, "post_norms": True, "qk_norm": True},
        **_BIASED,
    ),
    "gpt2": Defaults(
        *(50257, 768, 0, 12, 12),
        norm_eps=1e-5,
        tied=True,
        biased=True,
        fixed={"activation": "gelu_tanh", "layer_norm": True, "ungated": True},
    ),
    "gpt_oss": Defaults(
        *(201088, 2880, 2880, 36, 64, 8),
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150_000.0,
        window=128,
        biased=True,
        experts_key="num_local_experts",
        experts=128,
        experts_per_token=4,
        fixed={"activation": "clipped_silu", "sinks": True, "expert_bias": True},
        **_BIASED,
    ),
    "phi3": Defaults(32064, 3072, 8192, 32, 32, norm_eps=1e-5),
    "deepseek_v2": Defaults(
        *(32000, 4096, 11008, 32, 32),
        experts=64,
        expert_ffn_dim=1407,
        shared_experts=2,
        **_DEEPSEEK,
    ),
    "deepseek_v3": Defaults(
        *(129280, 7168, 18432, 61, 128),
        experts=256,
        experts_per_token=8,
        expert_ffn_dim=2048,
        shared_experts=1,
        dense_layers=3,
        **_DEEPSEEK,
    ),
}


# What GPT-2's file calls what others have other names for, as its class maps them.
GPT_2 = {
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
# Encoders with a decoder, and what their classes say where a file says nothing
T5_FAMILIES: dict[str, T5Shape] = {
    "t5": T5Shape(),
    "mt5": T5Shape(
        vocab=250112, ffn_dim=1024, layers=8, decoder_layers=8, heads=6, gated=True, tied=False
    ),
}
T5_ACTIVATIONS = {"relu": False, "gated-gelu": True}  # and whether they are gated


Shape = LlamaShape | T5Shape | dict[str, Any]


def read_hf_config(path: Path | str) -> Shape:
    """The decoder, or the encoder and decoder, that a ``config.json`` describes, or the name of a
    public model; what it says where that is a model that only ``transformers`` builds.

    InputError names the file and the key; UnsupportedError a model that is not of these families
    where ``transformers`` is not installed.
    """
    return hf_shape(config_document(path), str(path))


def hf_shape(document: dict[str, Any], where: str = "config.json") -> Shape:
    """The model of a decoded configuration; InputError names every value that is wrong."""
    if "model_type" not in document:
        raise InputError(expected(f"{where}: model_type", "a value", "none"))
    family = document["model_type"]
    if not isinstance(family, str) or family not in (*FAMILIES, *T5_FAMILIES):
        return _of_transformers(document, where)
    renamed = GPT_2 if family == "gpt2" else {}
    read = Reader({renamed.get(key, key): value for key, value in document.items()}, where)
    try:
        found = _read(read, family)
    except InputError:
        # What does not fit a default that stands in for a wrong value is no news of the file.
        if not read.wrong:
            raise
    if read.wrong:
        raise InputError(f"{where}: {'; '.join(read.wrong)}.")
    return found


def _read(read: Reader, family: str) -> LlamaShape | T5Shape:
    _refuse_others(read, family)
    if family in T5_FAMILIES:
        return _t5_shape(read, T5_FAMILIES[family])
    shape = msgspec.structs.replace(_shape(read, FAMILIES[family]), dtype=_dtype(read))
    if read.wrong:
        return shape
    check_shape(shape, read.where)
    return msgspec.structs.replace(shape, unread=read.unread(HARMLESS) or UNSET)


OWN = "Give the model as model.python = 'package.module:function'."


def _of_transformers(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The document of a family that no kind of ours builds, for ``models/hf.py``."""
    family, build = document["model_type"], "Install transformers, which builds it, or give"
    _refuse_quantized(document, where)
    if isinstance(family, str) and find_spec("transformers"):
        if not document.get("architectures"):
            wanted = "the class of transformers that builds it"
            raise InputError(expected(f"{where}: architectures", wanted, "none"))
        return document
    known = f"one of {', '.join((*FAMILIES, *T5_FAMILIES))}"
    remedy = OWN.replace("Give", build)
    raise UnsupportedError(expected(f"{where}: model_type", known, repr(family), remedy))


def _refuse_quantized(document: dict[str, Any], where: str) -> None:
    if document.get("quantization_config"):
        wanted = "none, for weights are taken to be whole"
        raise UnsupportedError(expected(f"{where}: quantization_config", wanted, "one", OWN))


# What a file says that changes no byte and no second of a step as these are worked out: names, ids,
# what is for generating, how weights begin, how positions turn, and how an expert is chosen.
_SAID = """
    _name_or_path architectures auto_map aux_loss_alpha bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id embd_pdrop eos_token_id ep_size
    experts_per_token hidden_act hidden_activation id2label initial_context_length
    initializer_factor initializer_range is_decoder is_encoder_decoder label2id layer_types
    max_position_embeddings max_window_layers model_type n_ctx n_group n_positions
    norm_topk_prob num_nextn_predict_layers original_max_position_embeddings output_past
    pad_token_id pretraining_tp query_pre_attn_scalar rope_interleave rope_local_base_freq
    rope_parameters rope_scaling rope_theta routed_scaling_factor router_aux_loss_coef
    scoring_func seq_aux sliding_window sliding_window_pattern summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj swiglu_limit
    task_specific_params tokenizer_class topk_group topk_method transformers_version
    unk_token_id use_cache use_sliding_window
"""
HARMLESS = frozenset(_SAID.split())
_SILU = ("silu", "swish")
ACTIVATIONS = {
    "silu": _SILU,
    "clipped_silu": _SILU,
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu"),
}
HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def _refuse_others(read: Reader, family: str) -> None:
    """Refuse what makes another model of a family: quantized weights, another head or gate."""
    _refuse_quantized(read.document, read.where)
    # A file without one is a bare model, which is trained with the usual head.
    made = read.document.get("architectures") or [HEADS[0]]
    if not isinstance(made, list) or not any(str(name).endswith(HEADS) for name in made):
        wanted = f"a model for tokens, such as one that ends in {HEADS[0]}"
        raise UnsupportedError(expected(f"{read.where}: architectures", wanted, repr(made), OWN))
    gate = "" if family in T5_FAMILIES else FAMILIES[family].fixed.get("activation", "silu")
    for key in ("hidden_activation", "hidden_act") if gate else ():
        found = read.document.get(key)
        if found is not None and found not in ACTIVATIONS[gate]:
            wanted = f"one of {', '.join(ACTIVATIONS[gate])} for a {family}"
            raise UnsupportedError(expected(f"{read.where}: {key}", wanted, repr(found), OWN))


def _dtype(read: Reader) -> Any:
    """What a model is loaded in."""
    given = {key: read.document.get(key) for key in ("dtype", "torch_dtype")}
    found = said_dtype(given)
    if found and found not in DTYPES.values():
        key = "dtype" if given["dtype"] else "torch_dtype"
        remedy = "Leave it out, and name memory.param_dtype in the job."
        wanted = f"one of {', '.join(DTYPES)}"
        raise UnsupportedError(expected(f"{read.where}: {key}", wanted, repr(found), remedy))
    return found or UNSET


def _t5_shape(read: Reader, usual: T5Shape) -> T5Shape:
    """A T5; its decoder is as deep as its encoder unless the file says otherwise."""
    activation = read.document.get("feed_forward_proj")
    if activation not in (None, *T5_ACTIVATIONS):
        wanted = f"one of {', '.join(T5_ACTIVATIONS)}"
        raise UnsupportedError(
            expected(f"{read.where}: feed_forward_proj", wanted, repr(activation))
        )
    layers = read.size("num_layers", usual.layers)
    undropped = read.document.get("dropout_rate") == 0
    return T5Shape(
        vocab=read.size("vocab_size", usual.vocab),
        dim=read.size("d_model", usual.dim),
        head_dim=read.size("d_kv", usual.head_dim),
        ffn_dim=read.size("d_ff", usual.ffn_dim),
        layers=layers,
        decoder_layers=read.size("num_decoder_layers", layers),
        heads=read.size("num_heads", usual.heads),
        buckets=read.size("relative_attention_num_buckets", usual.buckets, 4),
        farthest=read.size("relative_attention_max_distance", usual.farthest),
        dropout=0.0 if undropped else read.real("dropout_rate", usual.dropout),
        norm_eps=read.real("layer_norm_epsilon", usual.norm_eps),
        gated=T5_ACTIVATIONS[activation] if activation else usual.gated,
        tied=read.flag("tie_word_embeddings", usual.tied),
        dtype=_dtype(read) or usual.dtype,
    )


def _shape(read: Reader, family: Defaults) -> LlamaShape:
    dim = read.size("hidden_size", family.dim)
    heads = read.size("num_attention_heads", family.heads)
    bias = read.flag(family.bias_key, family.biased) if family.bias_key else family.biased
    dense = LlamaShape(
        layers=read.size("num_hidden_layers", family.layers),
        dim=dim,
        heads=heads,
        kv_heads=read.size("num_key_value_heads", family.kv_heads or heads),
        # Of latent attention it follows from other keys, and hidden_size need not be a multiple of
        # the heads.
        head_dim=1 if family.latent else _head_dim(read, family, dim, heads),
        ffn_dim=read.size("intermediate_size", family.ffn_dim or 4 * dim),
        vocab=read.size("vocab_size", family.vocab),
        norm_eps=read.real("rms_norm_eps", family.norm_eps),
        rope_theta=read.theta(family.rope_theta),
        tied_embeddings=read.flag("tie_word_embeddings", family.tied),
        attention_bias=bias,
        output_bias=bias and family.output_follows,
        mlp_bias=bool(family.mlp_bias_key) and read.flag(family.mlp_bias_key, False),
        sliding_window=_window(read, family),
        logit_cap=_cap(read, "final_logit_softcapping", family.logit_cap),
        attention_cap=_cap(read, "attn_logit_softcapping", family.attention_cap) or UNSET,
        **family.fixed,
    )
    if family.fixed.get("layer_norm"):
        return _as_gpt(read, dense)
    shape = _with_latent(read, dense) if family.latent else dense
    return _with_experts(read, family, shape) if family.experts_key else shape


def _as_gpt(read: Reader, shape: LlamaShape) -> LlamaShape:
    """With biases in all linear layers, learned positions, and dropout, by default 0.1."""
    dropout, attention = (
        0.0 if read.document.get(key) == 0 else read.real(key, 0.1)
        for key in ("resid_pdrop", "attn_pdrop")
    )
    return msgspec.structs.replace(
        shape,
        output_bias=True,
        mlp_bias=True,
        positions=read.size("max_position_embeddings", 1024),
        dropout=dropout or UNSET,
        attention_dropout=attention or UNSET,
    )


def _head_dim(read: Reader, family: Defaults, dim: int, heads: int) -> int:
    """What the file or the family says, else what the heads share."""
    if dim % heads and not family.head_dim and read.document.get("head_dim") is None:
        raise InputError(
            expected(
                f"{read.where}: num_attention_heads",
                f"a divisor of hidden_size {dim}, or head_dim beside it",
                str(heads),
            )
        )
    return read.size("head_dim", family.head_dim or dim // heads)


def _cap(read: Reader, key: str, usual: float) -> float:
    """What a tanh keeps numbers below, 0 for nothing: null in the file, or no such family."""
    # A family without a cap does not ask for the key: if its file has one, it is told as unread.
    if not usual or read.document.get(key, True) is None:
        return 0.0
    return read.real(key, usual)


def _window(read: Reader, family: Defaults) -> int | None:
    """What attention looks back at most: null in a Mistral's file means everything."""
    # Qwen's files name a window and switch it off beside it; without the switch every layer would
    # be taken to look back only so far.
    if family.window_key:
        return read.size("sliding_window", 4096) if read.flag(family.window_key, False) else None
    return read.unless_null("sliding_window", family.window)


def _with_latent(read: Reader, shape: LlamaShape) -> LlamaShape:
    """Every head has keys of its own; a null rank of queries means that they are made at once."""
    if read.flag("attention_bias", False):
        raise UnsupportedError(expected(f"{read.where}: attention_bias", "false", "true"))
    widths = {key: read.size(key, usual) for key, usual in LATENT.items()}
    unturned = read.size("qk_nope_head_dim", UNTURNED)
    return msgspec.structs.replace(
        shape,
        kv_heads=shape.heads,
        head_dim=unturned + widths["qk_rope_head_dim"],
        q_lora_rank=read.unless_null("q_lora_rank", Q_LORA_RANK) or 0,
        **widths,
    )


def _with_experts(read: Reader, family: Defaults, dense: LlamaShape) -> LlamaShape:
    """The layers with experts: every ``decoder_sparse_step``-th but those that are named, and the
    first ones."""
    # Qwen counts layers from 1 here and DeepSeek from 0, as their own code does.
    step, plain = read.size("decoder_sparse_step", 1), read.numbers("mlp_only_layers")
    first = read.size("first_k_dense_replace", family.dense_layers, 0)
    every = read.size("moe_layer_freq", 1)  # DeepSeek's, from layer 0 on
    layers = [
        i
        for i in range(first, dense.layers)
        if (i + 1) % step == 0 and i % every == 0 and i not in plain
    ]
    wide = read.size("moe_intermediate_size", family.expert_ffn_dim or dense.ffn_dim)
    chosen = read.document.get("num_experts_per_tok")
    if layers and chosen is None and not family.experts_per_token:
        wanted, remedy = "how many experts see a token", "Its class has no default: set it."
        raise InputError(expected(f"{read.where}: num_experts_per_tok", wanted, "none", remedy))
    shared = 0
    if family.shared_ffn_dim:
        shared = read.size("shared_expert_intermediate_size", family.shared_ffn_dim)
    elif family.shared_experts:
        shared = wide * read.size("n_shared_experts", family.shared_experts)
    return msgspec.structs.replace(
        dense,
        experts=read.size(family.experts_key, family.experts),
        experts_per_token=read.size("num_experts_per_tok", family.experts_per_token),
        expert_ffn_dim=wide,
        shared_ffn_dim=shared,
        # Only Qwen's shared expert has a gate, and only Qwen names the shared width itself.
        shared_gate=family.shared_ffn_dim > 0,
        moe_layers=tuple(layers),
    )
