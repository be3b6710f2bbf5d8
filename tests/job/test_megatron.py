"""Arguments of Megatron-LM become the job that takes the same memory, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.core.errors import InputError, ShardwrightError, UnsupportedError
from shardwright.core.llama import LlamaShape
from shardwright.job.job import parse_job
from shardwright.job.megatron import arguments, job_of

LLAMA_3_8B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --vocab-size 128256 --seq-length 8192
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --bf16
"""
SCRIPT = f"""#!/bin/bash
# one node
TP=${{TP:-2}}
export PP="4"
MODEL_ARGS=({LLAMA_3_8B})
TRAINING="
    --micro-batch-size 2 \\
    --use-distributed-optimizer
"
torchrun --nproc_per_node 8 pretrain_gpt.py ${{MODEL_ARGS[@]}} $TRAINING \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${{PP}} --sequence-parallel
"""


def document(more: str = "", ranks: int | None = None) -> dict[str, dict[str, Any]]:
    return job_of(f"{LLAMA_3_8B} {more}", ranks).document


def test_widths_are_those_of_the_model() -> None:
    shape = parse_job(document()).model.shape
    assert isinstance(shape, LlamaShape)
    assert shape.parameter_count == 8_030_261_248


def test_a_script_is_read_with_its_lists_quotes_and_variables() -> None:
    found = job_of(SCRIPT, 64).document
    parallel = found["parallel"]
    assert (parallel["tensor"], parallel["pipeline"], parallel["data_shard"]) == (2, 4, 8)
    assert parallel["sequence"] is True
    assert found["memory"]["zero"] == 1
    assert found["batch"] == {"size": 2, "sequence": 8192}


def test_several_commands_may_stand_on_one_line() -> None:
    first = f"TP=8; export PP=2;\nrun {LLAMA_3_8B} --tensor-model-parallel-size $TP; wait"
    script = f"{first}\nrun --pipeline-model-parallel-size ${{PP}};"
    parallel = job_of(script, 16).document["parallel"]
    assert (parallel["tensor"], parallel["pipeline"]) == (8, 2)


def test_a_switch_is_true_and_several_values_are_the_first() -> None:
    found = arguments("--bf16 --split 99 1 --a_b=3 # --fp16")
    assert found == {"bf16": True, "split": 99, "a-b": 3}


@pytest.mark.parametrize(
    ("more", "section", "key", "wanted"),
    [
        ("--recompute-granularity full", "memory", "checkpointing", "full"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
            "memory",
            "checkpointing",
            "first:5",
        ),
        ("--recompute-activations", "memory", "checkpointing", "core_attention"),
        ("--recompute-granularity selective", "memory", "checkpointing", "core_attention"),
        ("--grad-reduce-in-bf16", "memory", "reduce_dtype", "bf16"),
        ("--use-torch-fsdp2", "memory", "runtime", "fsdp2"),
        ("--optimizer-cpu-offload", "memory", "offload", "states"),
        ("--optimizer sgd", "train", "optimizer", "sgd_momentum"),
        ("--qk-layernorm", "model", "qk_norm", True),
        ("--num-experts 8 --moe-layer-freq [0]*2+[1]*30", "model", "moe_layers", [*range(2, 32)]),
        ("--num-experts 8 --moe-layer-freq 16", "model", "moe_layers", [0, 16]),
        ("--context-parallel-size 2", "parallel", "context", 2),
        ("--mtp-num-layers 1", "model", "mtp_layers", 1),
        (
            "--num-experts 8 --expert-model-parallel-size 4 --tensor-model-parallel-size 2",
            "parallel",
            "expert_tensor",
            2,
        ),
        ("--tensor-model-parallel-size 2", "parallel", "sequence", False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "parallel", "sequence", True),
        ("--global-batch-size 12 --micro-batch-size 4", "parallel", "microbatches", 3),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            "parallel",
            "chunks",
            4,
        ),
    ],
)
def test_what_changes_memory_is_followed(more: str, section: str, key: str, wanted: Any) -> None:
    found = document(more)
    assert found[section][key] == wanted
    parse_job(found)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--attention-dropout $RATE", "--attention-dropout: expected a number, got '\\$RATE'"),
        ("--hidden-dropout", "--hidden-dropout: expected a number, got True"),
        ("--num-experts 8 --moe-layer-freq 0", "--moe-layer-freq: expected a number, or a list"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(more: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        document(more)


def test_without_arguments_it_is_a_gpt_as_megatron_has_it_by_default() -> None:
    text = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"
    found = job_of(f"{text} --max-position-embeddings 2048 --vocab-file gpt2-vocab.json", 1)
    assert found.assumed == ("--vocab-size 50257, by its tokenizer",)
    shape = parse_job(found.document).model.shape
    assert isinstance(shape, LlamaShape)
    # Per layer 12 matrices of 12288 squared and 13 vectors; words in multiples of 128.
    assert shape.parameter_count == 12_288 * (96 * (12 * 12_288 + 13) + 50_304 + 2048 + 2)
    assert (shape.layer_norm, shape.ungated, shape.learned_positions) == (True, True, 2048)
    assert (shape.mlp_bias, shape.dropout, shape.attention_dropout) == (True, 0.1, 0.1)


def test_what_is_by_default_may_be_said() -> None:
    same = "--hidden-dropout 0 --mtp-num-layers 0 --moe-latent-size 0 --recompute-num-layers 1"
    assert job_of(f"{LLAMA_3_8B} {same}", None).document == document()


def test_values_by_name_are_arguments_too() -> None:
    named = {f"--{name}": value for name, value in arguments(LLAMA_3_8B).items()}
    switch = {"--qk-layernorm": False, "--bf16": True}
    assert job_of(named | switch, None).document == document()


@pytest.mark.parametrize(
    ("more", "key", "wanted"),
    [
        ("--attention-backend flash", "attention_backend", "flash"),
        ("--transformer-impl local", "attention_backend", "local"),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
        ("--cross-entropy-loss-fusion", "cross_entropy_loss_fusion", "native"),
        ("--fp8-format hybrid", "fp8_format", "hybrid"),
        (
            "--no-create-attention-mask-in-dataloader",
            "create_attention_mask_in_dataloader",
            False,
        ),
    ],
)
def test_how_layers_compute_is_said_by_megatrons_names(more: str, key: str, wanted: Any) -> None:
    found = document(more)
    assert found["memory"]["megatron"] == {key: wanted}
    parse_job(found)


def test_there_is_no_argument_by_which_logits_would_be_gathered() -> None:
    assert "megatron" not in document("--no-parallel-output")["memory"]


def test_all_that_no_estimate_follows_is_named_at_once() -> None:
    with pytest.raises(UnsupportedError) as caught:
        document("--fp4-format e2m1 --img-h 336 --attention-output-gate")
    said = str(caught.value)
    assert all(f"--{name}: expected none" in said for name in ("fp4-format", "img-h"))
    assert said.count("; ") == 2
    assert "\n" not in said


def test_latent_attention_has_its_widths() -> None:
    widths = "--kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 96"
    shape = parse_job(document(f"--multi-latent-attention --qk-layernorm {widths}")).model.shape
    assert isinstance(shape, LlamaShape)
    assert (shape.kv_lora_rank, shape.q_lora_rank, shape.value_dim) == (512, 1536, 128)
    assert (shape.head_dim, shape.turned_dim) == (160, 64)


def test_words_are_rounded_up_for_every_tensor_rank() -> None:
    found = document("--tensor-model-parallel-size 4 --vocab-size 50257")
    assert found["model"]["vocab"] == 50688


def test_what_changes_nothing_and_what_is_not_read_are_said_apart() -> None:
    found = job_of(f"{LLAMA_3_8B} --lr 1e-4 --log-interval 1 --flash-decode", None)
    assert found.harmless == ("--lr", "--log-interval")
    assert found.unread == ("--flash-decode",)
    assert found.assumed == ()


@pytest.mark.parametrize(
    ("text", "ranks", "error", "words"),
    [
        (
            "--num-layers 2 --mtp-use-repeated-layer",
            None,
            UnsupportedError,
            "further tokens, got True; --hidden-size: expected a number, got none.",
        ),
        (
            "pretrain_t5.py --num-layers 2",
            None,
            UnsupportedError,
            "those of a GPT, got pretrain_t5",
        ),
        (f"{LLAMA_3_8B} --num-layers two", None, InputError, "--num-layers: expected a number"),
        (f"{LLAMA_3_8B} --normalization BatchNorm", None, UnsupportedError, "--normalization"),
        (f"{LLAMA_3_8B} --fp4-format e2m1", None, UnsupportedError, "--fp4-format"),
        (
            f"{LLAMA_3_8B} --mtp-num-layers 2 --mtp-use-repeated-layer",
            None,
            UnsupportedError,
            "one block for several further tokens",
        ),
        (
            f"{LLAMA_3_8B} --recompute-granularity full --recompute-num-layers 4",
            None,
            UnsupportedError,
            "--recompute-num-layers",
        ),
        (
            f"{LLAMA_3_8B} --use-megatron-fsdp",
            None,
            UnsupportedError,
            "--data-parallel-sharding-strategy: expected optim_grads_params, got no_shard",
        ),
        (f"{LLAMA_3_8B} --tensor-model-parallel-size 8", 12, InputError, "-n: expected a multiple"),
        (f"{LLAMA_3_8B} --global-batch-size 3", 2, InputError, "--global-batch-size"),
        (f"{LLAMA_3_8B} 'open", None, InputError, "words of a shell"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(
    text: str, ranks: int | None, error: type[ShardwrightError], words: str
) -> None:
    with pytest.raises(error) as caught:
        job_of(text, ranks)
    assert words in str(caught.value)


def test_what_is_missing_is_named_at_once() -> None:
    with pytest.raises(UnsupportedError) as error:
        job_of("--seq-length x --lora-rank 8", None)
    missing = ("hidden-size", "num-attention-heads", "num-layers", "vocab-size")
    for name in missing:
        assert f"--{name}: expected a number, got none" in str(error.value)
    assert "--seq-length: expected a number from 1, got 'x'" in str(error.value)
    assert "--lora-rank: expected none" in str(error.value)
    assert str(error.value).count("num-layers") == 1
