from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ctxflow.models import answering
from ctxflow.models.answering import request_engine


class Located(Exception):
    """In the place of an engine."""


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
@pytest.mark.parametrize("where", ["options", "settings"])
def test_a_model_is_looked_for_in_the_revision_that_was_asked_for(monkeypatch, backend, where):
    seen = []

    def locate(model, *, revision=None):
        seen.append((model, revision))
        return Path(model)

    def check(*args):
        raise Located

    monkeypatch.setattr(answering, "locate_model", locate)
    monkeypatch.setattr(answering, "check_ability", check)
    given = {"revision": "v2"}
    given = {"options": given} if where == "options" else given
    with pytest.raises(Located):
        asyncio.run(request_engine.function(backend, "some/model", **given))
    assert seen == [("some/model", "v2")]
