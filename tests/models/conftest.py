"""Small models that the tests of this room share, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ctxflow.models.transformers import LoadedModel, load_language_model
from ctxflow.testing.small_models import make_causal_lm


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more; on busy cores, threads that wait for each other take forever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def causal_lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_causal_lm(tmp_path_factory.mktemp("causal_lm"))


@pytest.fixture(scope="session")
def causal_lm(causal_lm_folder: Path) -> LoadedModel:
    """In float64, where no near-tie decides."""
    return load_language_model(causal_lm_folder, dtype="float64", device="cpu")
