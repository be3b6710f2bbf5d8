"""A Hugging Face model's ``config.json`` as the job that trains it."""

from __future__ import annotations

from typing import Any

from shardwright.job.asked import LONGEST, tokens_of
from shardwright.job.hf_config import HARMLESS, hf_shape
from shardwright.job.imported import Document, Imported


def job_of(config: dict[str, Any], path: str, world_size: int | None) -> Imported:
    """The job of the model in ``path``, whose decoded text is ``config``.

    InputError: a value that is none; UnsupportedError: a model of another family.
    """
    shape = hf_shape(config, path)
    tokens = tokens_of(config, otherwise=LONGEST)
    ranks = world_size or 1
    document: Document = {
        "model": {"hf_config": path},
        "cluster": {"compute_device": "cuda", "world_size": ranks},
        "batch": {"size": 1, "sequence": tokens},
    }
    named = next((key for key in ("dtype", "torch_dtype") if config.get(key)), "")
    dtype = f"computed in {config[named]}, its {named}" if named else "no dtype named, so ours"
    assumed = (dtype, f"batches of 1 x {tokens} tokens a rank", f"{ranks} ranks", "AdamW")
    harmless = tuple(key for key in config if key in HARMLESS)
    return Imported(document, harmless, getattr(shape, "unread", None) or (), assumed)
