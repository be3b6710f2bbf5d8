"""Every constant and rule of this runtime profile that came from measured rows."""

from __future__ import annotations

import msgspec


class Fitted(msgspec.Struct, frozen=True):
    """What was taken from measurements, its value, and the rows it was taken from."""

    what: str
    value: str
    rows: tuple[str, ...]


FITTED = (
    Fitted(
        "tensors between stages that stay after an interleaved step",
        "2 for each virtual stage and 1 more",
        (
            "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_"
            "overlap_optimizer",
        ),
    ),
    Fitted(
        "which tests ran on an old Transformer Engine, whose deterministic attention is unfused",
        "lts rows of dracooci machines and of tests that resume from a frozen checkpoint",
        (
            "gpt/gpt3_mcore_te_tp1_pp1_frozen_resume_torch_dist_dist_optimizer",
            "gpt/gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
            "gpt/gpt3_mcore_te_tp1_pp4_resume_torch_dist_persistent_disable_bias_linear",
            "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_"
            "param_gather",
            "moe/gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        ),
    ),
    Fitted(
        "deterministic attention that Transformer Engine picks on Blackwell",
        "flash attention",
        (
            "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_1node",
            "gpt/gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
        ),
    ),
    Fitted(
        "ranks of a release test, which its arguments do not give",
        "64",
        ("mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release",),
    ),
)


class FirstLook(msgspec.Struct, frozen=True):
    """The errors of the first whole run over rows whose peaks nothing had been compared with."""

    rows: int
    configurations: int
    median: float
    p90: float
    worst: float


FIRST_LOOK = FirstLook(rows=57, configurations=26, median=0.019, p90=0.078, worst=0.124)
"""2026-11-21: activations were written from source and checked on the peaks of other rows; the
states of all rows had been compared before. What was changed after this run follows from a source
or stands in :data:`FITTED`."""
