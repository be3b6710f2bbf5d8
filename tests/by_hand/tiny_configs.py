"""What ``config.json`` says of tiny models of families that need more than a llama's widths."""

from __future__ import annotations

from typing import Any

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "intermediate_size": 200,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "vocab_size": 500,
    },
    "gemma2": {
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 200,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    },
    "gpt_oss": {
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 500,
    },
}
