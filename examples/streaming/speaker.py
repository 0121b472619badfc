"""The model of the streaming example, and how it makes the next words of several sessions in one call.

It is a causal language model of random weights, made from a configuration: its words are noise. What is real is all
around it: the forward passes of transformers, and each session's keys and values as its state.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxflow import context, idle, session_app

NOTICE = "A model of random weights speaks here: its words are noise."
WORDS = """
the a an and or but so yet of in on at to from with by for over under near far sea wind wave tide boat sail rope
harbour light lamp house door road hill river bridge rain snow cloud sun moon star night day morning evening
north south east west old new long short small great quiet loud warm cold blue green grey white is was comes
goes stays turns falls rises waits asks says hears sees knows finds keeps gives takes we you they it he she who
""".split()  # noqa: SIM905 - a list of as many lines says less
CHUNK_WORDS = 6
WINDOW = 96
"""How many tokens a session remembers: what came before is dropped from its keys and values."""


@dataclass
class State:
    """What a session keeps.

    :ivar keys: and values of what it remembers: a tensor (layers, 2, heads, tokens, dimensions), None at first.
    :ivar pending: tokens that the model has not read.
    :ivar position: of the first of these in the whole session.
    :ivar left: words that it still owes its user.
    """

    keys: Any = None
    pending: list[int] = field(default_factory=list)
    position: int = 0
    left: int = 0
    seed: int = 0


@context
def speaker(hidden: int = 128, layers: int = 4, seed: int = 0) -> Any:
    """Build the model, once per worker."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.set_num_threads(1)  # So small a model's threads would only wait for each other.
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def tokens_of(text: str) -> list[int]:
    """The words of a text as tokens; words that the model lacks stand for one that it has.

    >>> tokens_of("the sea") == [WORDS.index("the"), WORDS.index("sea")]
    True
    """
    numbers = {word: number for number, word in enumerate(WORDS)}
    words = text.lower().split() or [WORDS[0]]
    return [numbers.get(word, zlib.crc32(word.encode()) % len(WORDS)) for word in words]


def next_words(model: Any, states: Sequence[State | None], prompts: Sequence[Sequence[Any]]) -> list[tuple[Any, State]]:
    """The next words of each session; a prompt is a pair of a text and how many words are wanted."""
    ready = [_prompted(state, new) for state, new in zip(states, prompts, strict=True)]
    counts = [min(CHUNK_WORDS, state.left) for state in ready]
    spoken = _speak(model, ready, max(counts))
    made = []
    for state, words, count in zip(ready, spoken, counts, strict=True):
        state.left -= count
        text = " ".join(WORDS[word] for word in words[:count])
        made.append((text if state.left else idle(text), state))
    return made


def _prompted(state: State | None, prompts: Sequence[tuple[str, int]]) -> State:
    state = state or State()
    for text, words in prompts:
        state.pending += tokens_of(text)
        state.left += words
        state.seed = zlib.crc32(text.encode(), state.seed)
    return state


def _speak(model: Any, states: Sequence[State], words: int) -> list[list[int]]:
    """Have the model read what is pending and speak so many words, for all sessions at a time.

    What sessions remember differs in length: it is filled up on the left, and masked there.
    """
    import torch
    from transformers import DynamicCache

    spoken: list[list[int]] = [[] for _ in states]
    past = max((state.keys.shape[3] for state in states if state.keys is not None), default=0)
    width = max(len(state.pending) for state in states)
    mask = torch.zeros(len(states), past + width, dtype=torch.long)
    positions = torch.zeros(len(states), width, dtype=torch.long)
    inputs = torch.zeros(len(states), width, dtype=torch.long)
    for row, state in enumerate(states):
        here, new = 0 if state.keys is None else state.keys.shape[3], len(state.pending)
        mask[row, past - here : past] = 1
        mask[row, past + width - new :] = 1
        inputs[row, width - new :] = torch.tensor(state.pending)
        positions[row, width - new :] = torch.arange(state.position, state.position + new)
    with torch.inference_mode():
        cache = DynamicCache(_joined(states, past, model.config)) if past else DynamicCache()
        for _ in range(words):
            output = model(inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            positions = positions[:, -1:] + 1
            inputs = _drawn(output.logits[:, -1], states, positions)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            for row, word in enumerate(inputs[:, 0].tolist()):
                spoken[row].append(word)
        remembered = torch.stack([torch.stack((layer.keys, layer.values)) for layer in cache.layers])
    for row, state in enumerate(states):
        own = mask[row, :-1].nonzero()[-WINDOW:, 0]  # The last word was drawn, and not read.
        state.keys = remembered[:, :, row].index_select(3, own)
        state.pending, state.position = [spoken[row][-1]], int(positions[row, 0])
    return spoken


def _joined(states: Sequence[State], past: int, config: Any) -> list[tuple[Any, Any]]:
    """The keys and values of all, filled up on the left to one length, by layer."""
    import torch

    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    joined = torch.zeros(config.num_hidden_layers, 2, len(states), heads, past, width)
    for row, state in enumerate(states):
        if state.keys is not None:
            joined[:, :, row, :, past - state.keys.shape[3] :] = state.keys
    return [(layer[0], layer[1]) for layer in joined]


def _drawn(logits: Any, states: Sequence[State], positions: Any) -> Any:
    """A word for each session, drawn by a seed of its own: whoever speaks beside it, the words are the same.

    Logits are rounded, since sums in another order differ in the last digits.
    """
    import torch

    noise = torch.stack(
        [
            torch.empty(logits.shape[1]).exponential_(generator=torch.Generator().manual_seed(state.seed + int(at)))
            for state, at in zip(states, positions[:, 0], strict=True)
        ]
    )
    return (torch.round(logits, decimals=3) - noise.log()).argmax(-1, keepdim=True)


def app(chunk_target: float | None = 0.2, keep_every: int = 8, **model: int) -> Any:
    """The session app of a model."""
    return session_app(speaker(**model), chunk_target=chunk_target, keep_every=keep_every, ahead=4)(next_words)
