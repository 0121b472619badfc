"""The parts of a sentence-transformers model that follow the transformer, read from the model's folder.

The folder's modules.json lists the parts in order; each has a folder with its config.json. See
https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html for the layout.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ctxflow.models.transformers import LoadedModel

_LEGACY_MODES = {  # in the order in which several are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """How texts go into one model and how its hidden states become vectors.

    :ivar modes: the poolings whose results are joined.
    :ivar steps: what is done to the pooled vectors, in order.
    :ivar dimension: numbers of a vector.
    :ivar max_tokens: the greatest length of a text, None if the folder does not say.
    :ivar include_prompt: whether the prompt's tokens are pooled too.
    """

    modes: tuple[str, ...]
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    dimension: int
    max_tokens: int | None = None
    lower_case: bool = False
    include_prompt: bool = True
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None

    def prompt(self, name: str | None) -> str:
        """The text that goes before each text.

        :raises ValueError: for a prompt that the model does not have.
        """
        name = name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ValueError(f"the model has no prompt named {name!r}: it has {known}")
        return self.prompts[name]

    def finish(self, hidden: torch.Tensor, mask: torch.Tensor, skipped: int = 0) -> torch.Tensor:
        """One vector a row.

        :param hidden: the transformer's last hidden states, shape (rows, tokens, hidden size).
        :param mask: 1 for tokens, 0 for padding on the right, shape (rows, tokens).
        :param skipped: tokens at each row's beginning that are not pooled.
        :returns: shape (rows, dimension), float32, or float64 for float64 hidden states.
        """
        states = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        pooled = torch.cat([pool(states, mask, mode, skipped) for mode in self.modes], dim=-1)
        for step in self.steps:
            pooled = step(pooled)
        return pooled


def pool(states: torch.Tensor, mask: torch.Tensor, mode: str, skipped: int = 0) -> torch.Tensor:
    """Reduce the states of each row's tokens to one vector; parameters and shapes as `Recipe.finish`.

    :raises ValueError: for an unknown mode.
    """
    skipped = min(skipped, mask.shape[1] - 1)
    if skipped:
        mask = mask.clone()
        mask[:, :skipped] = 0
    weights = mask.to(states.dtype)[..., None]
    if mode == "cls":
        return states[:, skipped]
    if mode == "lasttoken":
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)
        return states[torch.arange(len(states), device=states.device), last]
    if mode == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    if mode == "weightedmean":
        weights = weights * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=states.dtype)[None, :, None]
    elif mode not in ("mean", "mean_sqrt_len_tokens"):
        raise ValueError(f"the pooling {mode!r} is unknown: use the sentence-transformers library for this model")
    total = weights.sum(dim=1).clamp(min=1e-9)
    return (states * weights).sum(dim=1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def read_recipe(loaded: LoadedModel) -> Recipe:
    """The recipe that a model's folder describes; mean pooling if it describes none.

    :raises ValueError: for a part that is unknown here, naming it.
    """
    folder, hidden_size = loaded.folder, int(loaded.model.config.hidden_size)
    if not (folder / "modules.json").is_file():
        return Recipe(("mean",), (), hidden_size)
    modes: tuple[str, ...] = ()
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    include_prompt, dimension = True, hidden_size
    for number, part in enumerate(_read(folder / "modules.json")):
        kind, place = part["type"].rsplit(".", maxsplit=1)[-1], folder / part["path"]
        if kind == "Transformer" and number == 0 and not part["path"]:
            continue
        if kind == "Pooling" and number == 1:
            config = _read(place / "config.json")
            modes, include_prompt = _modes(config), config.get("include_prompt", True)
            dimension = len(modes) * hidden_size
        elif kind == "Dense" and modes:
            layer, dimension = _dense(place, loaded)
            steps.append(layer)
        elif kind == "Normalize" and modes:
            steps.append(_normalise)
        else:
            raise ValueError(
                f"{loaded.name} has the part {part['type']} as its number {number}, which is unknown here: "
                "use the sentence-transformers library in a context of your own"
            )
    return Recipe(modes, tuple(steps), dimension, include_prompt=include_prompt, **_settings(folder))


def _settings(folder: Path) -> dict[str, Any]:
    """What the folder says about texts: their length, case and prompts."""
    texts = _read(folder / "sentence_bert_config.json")
    method = texts.get("modality_config", {}).get("text", {}).get("method", "forward")
    if method != "forward":
        raise ValueError(
            f"{folder} reads texts by {method}, which is unknown here: use the sentence-transformers library"
        )
    prompts = _read(folder / "config_sentence_transformers.json")
    return {
        "max_tokens": texts.get("max_seq_length"),
        "lower_case": bool(texts.get("do_lower_case", False)),
        "prompts": prompts.get("prompts") or {},
        "default_prompt": prompts.get("default_prompt_name"),
    }


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("pooling_mode")
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    return tuple(mode for key, mode in _LEGACY_MODES.items() if config.get(key)) or ("mean",)


def _normalise(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, p=2, dim=-1)


def _dense(folder: Path, loaded: LoadedModel) -> tuple[torch.nn.Module, int]:
    """A dense layer with its activation, and how many numbers come out of it."""
    config = _read(folder / "config.json")
    activation = config.get("activation_function") or "torch.nn.modules.linear.Identity"
    unusual = (
        config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    )
    if not activation.startswith("torch.nn.") or unusual:
        raise ValueError(f"{folder} is a dense layer of a kind unknown here: use the sentence-transformers library")
    linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    if (folder / "model.safetensors").is_file():
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
    else:
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    layer = torch.nn.Sequential(linear, getattr(torch.nn, activation.rsplit(".", maxsplit=1)[-1])())
    dtype = torch.promote_types(loaded.dtype, torch.float32)
    return layer.requires_grad_(False).to(device=loaded.device, dtype=dtype), int(config["out_features"])
