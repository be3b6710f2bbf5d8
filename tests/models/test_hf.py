"""Models that ``transformers`` builds, where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from shardwright.estimate.footprint import footprint
from shardwright.job.asked import public_models
from shardwright.job.hf_config import FAMILIES, T5_FAMILIES
from shardwright.job.job import memory_of, read_job

pytestmark = pytest.mark.skipif(not find_spec("transformers"), reason="transformers builds them")
OURS = (*FAMILIES, *T5_FAMILIES)
NAMES = [n for n, m in public_models().items() if m.config["model_type"] not in OURS]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_as_many_parameters_as_its_published_files(name: str) -> None:
    from shardwright.models.hf import build

    model = public_models()[name]
    with torch.device("meta"):
        module, *_ = build(1, 8, model.config)
    assert sum(each.numel() for each in module.parameters()) == model.parameters - model.beside


@pytest.mark.parametrize("name", ["bert-base-uncased", "vit-base-patch16-224", "phi-2"])
def test_its_memory_is_estimated(name: str) -> None:
    job = read_job(name, ["memory.runtime=fsdp2", "batch.sequence=64"], "8xH100")
    found = footprint(job)
    assert (found.model, found.parameters) == (name, public_models()[name].parameters)
    assert found.fits
    assert bool(memory_of(job).param_dtype) is (name == "phi-2")
