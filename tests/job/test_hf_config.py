from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.t5 import T5Shape
from shardwright.job.hf_config import hf_shape, read_hf_config
from shardwright.job.job import memory_of, parse_job

LLAMA_3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
QWEN_3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
}

# Totals of the published weights, as their safetensors indices give them, of files that leave most
# to the defaults of their class; the list of public models has those that say everything.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": ({"model_type": "llama"}, 6_738_415_616),
    "Llama-3-8B": (LLAMA_3, 8_030_261_248),
    "Mistral-7B": ({"model_type": "mistral"}, 7_241_732_096),
    "Mixtral-8x7B": ({"model_type": "mixtral"}, 46_702_792_704),
    "Qwen3-8B": (
        {
            "model_type": "qwen3",
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (QWEN_3_MOE, 30_532_122_624),
    "Qwen1.5-MoE-A2.7B": ({"model_type": "qwen2_moe"}, 14_315_784_192),
    "Gemma-7B": ({"model_type": "gemma"}, 8_537_680_896),
    "Gemma-2-2B": ({"model_type": "gemma2"}, 2_614_341_888),
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "q_lora_rank": None,
            "vocab_size": 102400,
        },
        15_706_484_224,
    ),
    # Without the 58 x 256 corrections of its routers, which are updated without gradients, and
    # without the head that predicts a second token.
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 671_026_419_200 - 58 * 256),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_its_published_weights(name: str) -> None:
    document, parameters = PUBLISHED[name]
    assert hf_shape(document).parameter_count == parameters


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3 | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}))
    shape = read_hf_config(path)
    assert (shape.layers, shape.head_dim, shape.norm_eps, shape.rope_theta) == (32, 128, 1e-5, 5e5)


def test_what_is_missing_or_null_has_the_default_of_its_family() -> None:
    shape = hf_shape({"model_type": "llama", "num_key_value_heads": None, "head_dim": None})
    assert (shape.kv_heads, shape.head_dim, shape.norm_eps) == (32, 128, 1e-6)


def test_rotary_parameters_may_be_nested() -> None:
    nested = {"rope_parameters": {"rope_theta": 500000.0}}
    assert hf_shape({"model_type": "qwen3"} | nested).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "bias"),
    [
        ({"model_type": "qwen2"}, (True, False)),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, (False, False)),
        ({"model_type": "llama", "attention_bias": True}, (True, True)),
        ({"model_type": "mistral", "attention_bias": True}, (False, False)),
    ],
)
def test_biases_are_those_of_the_family(changes: dict[str, Any], bias: tuple[bool, bool]) -> None:
    shape = hf_shape(changes)
    assert (shape.attention_bias, shape.output_bias) == bias


@pytest.mark.parametrize(
    ("document", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 128}, None),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)
def test_a_window_counts_where_the_family_uses_it(
    document: dict[str, Any], window: int | None
) -> None:
    assert hf_shape(document).sliding_window == window


def test_queries_of_latent_attention_have_a_rank_unless_it_is_null() -> None:
    ranks = [
        hf_shape({"model_type": "deepseek_v3", **given}).q_lora_rank
        for given in ({}, {"q_lora_rank": 24}, {"q_lora_rank": None})
    ]
    assert ranks == [1536, 24, 0]


def test_logits_of_gemma_2_are_capped_unless_the_cap_is_null() -> None:
    caps = [
        hf_shape({"model_type": family, **given}).logit_cap
        for family, given in (
            ("gemma2", {}),
            ("gemma2", {"final_logit_softcapping": 20.0}),
            ("gemma2", {"final_logit_softcapping": None}),
            ("gemma", {}),
        )
    ]
    assert caps == [30.0, 20.0, 0.0, 0.0]


def test_scores_of_gemma_2_are_capped_unless_the_cap_is_null() -> None:
    caps = [
        hf_shape({"model_type": family, **given}).attention_cap or 0.0
        for family, given in (
            ("gemma2", {}),
            ("gemma2", {"attn_logit_softcapping": 20.0}),
            ("gemma2", {"attn_logit_softcapping": None}),
            ("gemma", {"attn_logit_softcapping": 20.0}),
        )
    ]
    assert caps == [50.0, 20.0, 0.0, 0.0]


def test_deepseek_v2_without_the_number_of_experts_for_a_token_says_what_is_missing() -> None:
    said = (
        "config.json: num_experts_per_tok: expected how many experts see a token, got none. Its "
        "class has no default: set it."
    )
    with pytest.raises(InputError) as refused:
        hf_shape({"model_type": "deepseek_v2"})
    assert str(refused.value) == said


def test_the_first_layers_of_deepseek_have_no_experts_and_a_shared_one_follows_the_routed() -> None:
    shape = hf_shape({"model_type": "deepseek_v3", "n_shared_experts": 2})
    assert shape.moe_layers == tuple(range(3, 61))
    assert (shape.shared_ffn_dim, shape.shared_gate) == (2 * 2048, False)


def test_deepseek_v3_uses_37_billion_parameters_for_a_token() -> None:
    shape = hf_shape({"model_type": "deepseek_v3"})
    used = msgspec.structs.replace(shape, experts=shape.experts_per_token)
    assert round(used.parameter_count / 1e9) == 37


def test_layers_with_experts_are_every_nth_but_those_that_are_named() -> None:
    sparse = {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert hf_shape(QWEN_3_MOE | sparse).moe_layers == (1, 5, 7)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "x: model_type: expected a value, got none."),
        ({"model_type": "llama", "hidden_size": "4k"}, "x: hidden_size: expected a whole number"),
        ({"model_type": "llama", "hidden_size": True}, "x: hidden_size: expected a whole number"),
        ({"model_type": "llama", "hidden_size": 0}, "x: hidden_size: expected a whole number"),
        ({"model_type": "llama", "rms_norm_eps": -1}, "x: rms_norm_eps: expected a number above"),
        (
            {"model_type": "llama", "tie_word_embeddings": 1},
            "x: tie_word_embeddings: expected true or false, got 1.",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 33},
            "x: num_attention_heads: expected a divisor of hidden_size 4096",
        ),
        (
            {"model_type": "llama", "num_key_value_heads": 5},
            "x.kv_heads: expected a divisor of the 32 heads, got 5.",
        ),
        ({"model_type": "t5", "d_kv": 0}, "x: d_kv: expected a whole number from 1, got 0."),
        (
            {"model_type": "t5", "feed_forward_proj": "gated-silu"},
            "x: feed_forward_proj: expected one of relu, gated-gelu, got 'gated-silu'.",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "x: mlp_only_layers: expected a list"),
    ],
)
def test_a_bad_value_is_named_with_its_file_and_key(document: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnsupportedError)) as caught:
        hf_shape(document, "x")
    assert str(caught.value).startswith(message)


def test_another_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedError) as caught:
        hf_shape({"model_type": "bert"}, "x")
    assert str(caught.value) == (
        "x: model_type: expected one of llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, "
        "qwen3_moe, gemma, gemma2, gemma3_text, gpt2, gpt_oss, phi3, deepseek_v2, deepseek_v3, t5, "
        "mt5, got 'bert'. Install transformers, which builds it, or give the model as "
        "model.python = 'package.module:function'."
    )


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\.json: expected a "):
        read_hf_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a model configuration file, got no such file"):
        read_hf_config(tmp_path / "none.json")


def test_a_llama_computes_in_what_its_configuration_says(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for key in ("torch_dtype", "dtype"):
        for name, dtype in (("bfloat16", "bf16"), ("float32", "fp32"), (None, "bf16")):
            path.write_text(json.dumps({"model_type": "llama", key: name}))
            document = {"model": {"hf_config": str(path)}, "cluster": {"preset": "h100-8"}}
            assert memory_of(parse_job(document)).param_dtype == dtype
    with pytest.raises(UnsupportedError, match=r"dtype: expected one of bfloat16.*'float8_e4m3fn'"):
        hf_shape({"model_type": "llama", "dtype": "float8_e4m3fn"})


def test_a_t5_has_parameters_of_its_configuration_s_dtype() -> None:
    shape = hf_shape({"model_type": "t5", "torch_dtype": "bfloat16"})
    assert isinstance(shape, T5Shape)
    assert shape.dtype == "bf16"


def test_what_makes_another_model_of_a_family_is_refused_by_its_key() -> None:
    for key, value in (
        ("quantization_config", {"load_in_4bit": True}),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("hidden_act", "relu"),
    ):
        with pytest.raises(UnsupportedError, match=f"config.json: {key}: expected"):
            hf_shape({"model_type": "llama", key: value})
    hf_shape({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None})


def test_keys_that_nobody_reads_are_named_unless_they_are_off_or_change_nothing() -> None:
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "use_cache": True}
    assert hf_shape(known).unread is UNSET
    found = hf_shape(
        known | {"residual_multiplier": 0.2, "some_flag": False, "attention_bias": True}
    )
    assert found.unread == ("residual_multiplier",)


def test_experts_of_every_nth_layer() -> None:
    config = {"model_type": "deepseek_v2", "num_hidden_layers": 6, "num_experts_per_tok": 2}
    found = hf_shape(config | {"first_k_dense_replace": 1, "moe_layer_freq": 2})
    assert found.moe_layers == (2, 4)


def test_all_values_that_are_wrong_are_named_at_once() -> None:
    wrong = {
        "hidden_size": "x",
        "num_hidden_layers": 0,
        "tie_word_embeddings": 3,
        "vocab_size": 2.5,
    }
    with pytest.raises(InputError) as error:
        hf_shape({"model_type": "llama", "rope_parameters": {"rope_theta": -1}} | wrong, "file")
    assert str(error.value) == (
        "file: hidden_size: expected a whole number from 1, got 'x'; "
        "num_hidden_layers: expected a whole number from 1, got 0; "
        "vocab_size: expected a whole number from 1, got 2.5; "
        "rope_parameters: rope_theta: expected a number above 0, got -1; "
        "tie_word_embeddings: expected true or false, got 3."
    )
