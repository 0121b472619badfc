"""Small models that the tests of this room share, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxflow.models.transformers import LoadedModel, load_language_model
from ctxflow.testing.models import make_causal_lm


@pytest.fixture(scope="session")
def causal_lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_causal_lm(tmp_path_factory.mktemp("causal_lm"))


@pytest.fixture(scope="session")
def causal_lm(causal_lm_folder: Path) -> LoadedModel:
    """In float64, where no near-tie decides."""
    return load_language_model(causal_lm_folder, dtype="float64", device="cpu")
