"""Keys and values of rows that are in a running batch, and the attention of models over them.

The rows' tokens go through a model as one long row, without padding: what was written last of each row, then the
prompts that are new. Only attention must know which tokens are whose. On a CPU each row attends to just its own keys,
which lie together; elsewhere, where many small kernels are dear, rows have slots of one length, and a mask hides what
is unused.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

IMPLEMENTATION = "ctxflow_rows"
"""What this attention is called among transformers' implementations."""


class Unsupported(Exception):
    """A model whose attention is another."""


class TokenStep(NamedTuple):
    """The tokens that go through a model together.

    :ivar lengths: for each row that was there before, in the store's order, its tokens with the one that is new.
    :ivar prompts: the number of tokens of each row that is new; rows that were there before come first.
    """

    lengths: Sequence[int]
    prompts: Sequence[int]


class Store(Protocol):
    """Where keys and values of the rows are. Rows have numbers from 0; when one leaves, the last takes its number."""

    def size(self, capacity: int = 0) -> int:
        """Return how many tokens its rows take of a budget, with another row of so many."""

    def enter(self, capacity: int, budget: int) -> None:
        """Make room for another row, which gets the next number; within so many tokens, unless rows need more.

        Where the device has no room the row has not entered, and the others stay as they are.
        """

    def leave(self, number: int) -> None:
        """Free a row's room."""

    def begin(self, step: TokenStep) -> None:
        """Prepare for the forward pass of a step."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any) -> Any:
        """Keep the new keys and values, and return attention; all of shape (tokens, heads, size of a head)."""


def make_store(device: torch.device, dtype: torch.dtype) -> Store:
    """Return an empty store for rows on a device."""
    return Segments(dtype) if device.type == "cpu" else Slots(device)


def _grouped(query: torch.Tensor, heads: int) -> torch.Tensor:
    """Return queries of one token a row with those that share keys together: (rows, heads of keys, in group, size)."""
    return query.reshape(query.shape[0], heads, -1, query.shape[2])


def _of_prompts(
    prompts: Sequence[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any
) -> list[torch.Tensor]:
    """Return the causal attention within each prompt."""
    found = []
    shared = query.shape[1] // key.shape[1]
    first = 0
    for length in prompts:
        q, k, v = (each[first : first + length].transpose(0, 1)[None] for each in (query, key, value))
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        out = scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=scale)
        found.append(out[0].transpose(0, 1))
        first += length
    return found


class Segments:
    """A store where each row's keys lie together and are read without any padding.

    Half types are kept, and attended to, as float32: torch's attention on CPUs is several times as quick in it, but
    where the processor multiplies matrices of bfloat16 (AMX), which helps prompts.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._half_prompts = dtype == torch.bfloat16 and _multiplies_bfloat16()
        self._keys: dict[int, torch.Tensor] = {}  # For each layer, of shape (heads, places, size).
        self._values: dict[int, torch.Tensor] = {}
        self._places = 0
        self._rows: list[tuple[int, int]] = []  # Each row's first place, and how many it has.
        self._taken: list[tuple[int, int]] = []  # The same, in order.
        self._step = TokenStep((), ())
        self._write = torch.zeros(0, dtype=torch.long)
        self._sizes: list[int] = []
        self._pieces: list[int] = []

    def size(self, capacity: int = 0) -> int:
        """As `Store.size`."""
        return sum(size for _, size in self._rows) + capacity

    def enter(self, capacity: int, budget: int) -> None:
        """As `Store.enter`."""
        first = self._hole(capacity)
        if first is None:
            self._rearrange(capacity)
            first = self._hole(capacity)
            assert first is not None
        self._rows.append((first, capacity))
        bisect.insort(self._taken, (first, capacity))

    def leave(self, number: int) -> None:
        """As `Store.leave`."""
        last = self._rows.pop()
        gone = last
        if number < len(self._rows):
            gone, self._rows[number] = self._rows[number], last
        self._taken.remove(gone)
        if not self._rows:
            self._keys, self._values, self._places = {}, {}, 0

    def begin(self, step: TokenStep) -> None:
        """As `Store.begin`."""
        self._step = step
        old = len(step.lengths)
        writing = [first + length - 1 for (first, _), length in zip(self._rows, step.lengths, strict=False)]
        for (first, _), length in zip(self._rows[old:], step.prompts, strict=True):
            writing.extend(range(first, first + length))
        self._write = torch.tensor(writing)
        # The places in order, as pieces of what the rows have, and what is between.
        order = sorted(range(old), key=lambda row: self._rows[row][0])
        self._sizes, self._pieces, end = [], [0] * old, 0
        for row in order:
            first = self._rows[row][0]
            self._sizes += [first - end, step.lengths[row]]
            self._pieces[row] = len(self._sizes) - 1
            end = first + step.lengths[row]
        self._sizes.append(self._places - end)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any) -> Any:
        """As `Store.attend`."""
        dtype = query.dtype
        exact = [each if each.dtype == self._dtype else each.to(self._dtype) for each in (query, key, value)]
        keys = self._kept(self._keys, layer, exact[1])
        values = self._kept(self._values, layer, exact[2])
        keys.index_copy_(1, self._write, exact[1].transpose(0, 1))
        values.index_copy_(1, self._write, exact[2].transpose(0, 1))
        old = len(self._step.lengths)
        found = []
        if old:
            queries = _grouped(exact[0][:old], key.shape[1])
            k, v = keys[None].split(self._sizes, 2), values[None].split(self._sizes, 2)
            rows = [
                scaled_dot_product_attention(q, k[piece], v[piece], scale=scale)
                for q, piece in zip(queries.split(1), self._pieces, strict=True)
            ]
            found.append(torch.cat(rows).reshape(old, query.shape[1], -1))
        if self._step.prompts:
            new = (query, key, value) if self._half_prompts else exact
            q, k, v = (each[old:] for each in new)
            found += [out.to(self._dtype) for out in _of_prompts(self._step.prompts, q, k, v, scale)]
        out = torch.cat(found) if len(found) > 1 else found[0]
        return out.to(dtype)

    def _hole(self, capacity: int) -> int | None:
        """Return the first place behind which so many are free."""
        end = 0
        for first, size in self._taken:
            if first - end >= capacity:
                return end
            end = first + size
        return end if self._places - end >= capacity else None

    def _rearrange(self, capacity: int) -> None:
        """Move the rows together, into more places where that does not make room enough."""
        used = sum(size for _, size in self._rows)
        if used + capacity > self._places:
            self._places = max(2 * self._places, used + capacity)
        moved = dict(zip(self._taken, itertools.accumulate((s for _, s in self._taken), initial=0), strict=False))
        for kept in (self._keys, self._values):
            for layer, old in kept.items():
                new = old.new_empty(old.shape[0], self._places, old.shape[2])
                for (first, size), place in moved.items():
                    new[:, place : place + size] = old[:, first : first + size]
                kept[layer] = new
        self._rows = [(moved[row], row[1]) for row in self._rows]
        self._taken = sorted(self._rows)

    def _kept(self, kept: dict[int, torch.Tensor], layer: int, like: torch.Tensor) -> torch.Tensor:
        found = kept.get(layer)
        if found is None:
            found = kept[layer] = like.new_empty(like.shape[1], self._places, like.shape[2])
        return found


def _multiplies_bfloat16() -> bool:
    try:
        return bool(torch.cpu._is_amx_tile_supported())
    except (AttributeError, RuntimeError):
        return False


class Slots:
    """A store where each row has a slot, all of one length, so that all rows attend in one call."""

    GRAIN = 64
    """Lengths of slots are multiples of it, so that they seldom change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: dict[int, torch.Tensor] = {}  # For each layer, of shape (slots, heads, length, size).
        self._values: dict[int, torch.Tensor] = {}
        self._slots = self._length = 0
        self._rows: list[int] = []  # Each row's tokens at most.
        self._step = TokenStep((), ())
        self._row = self._place = torch.zeros(0, dtype=torch.long)
        self._mask = torch.zeros(0, dtype=torch.bool)

    def size(self, capacity: int = 0) -> int:
        """As `Store.size`."""
        return (len(self._rows) + bool(capacity)) * self._rounded(max([capacity, *self._rows]))

    def enter(self, capacity: int, budget: int) -> None:
        """As `Store.enter`."""
        rows, length = len(self._rows) + 1, self._rounded(max([capacity, *self._rows]))
        if rows > self._slots or length > self._length:
            wanted = self._slots if rows <= self._slots else max(2 * self._slots, 8)
            self._resize(min(wanted, max(rows, budget // length)), length)
        self._rows.append(capacity)

    def leave(self, number: int) -> None:
        """As `Store.leave`."""
        last = len(self._rows) - 1
        if number < last:
            self._rows[number] = self._rows[last]
            for kept in itertools.chain(self._keys.values(), self._values.values()):
                kept[number] = kept[last]
        del self._rows[last]
        if not self._rows:
            self._keys, self._values, self._slots, self._length = {}, {}, 0, 0

    def begin(self, step: TokenStep) -> None:
        """As `Store.begin`."""
        self._step = step
        old = len(step.lengths)
        rows, places = list(range(old)), [length - 1 for length in step.lengths]
        for number, length in enumerate(step.prompts, old):
            rows += [number] * length
            places += range(length)
        self._row, self._place = torch.tensor([rows, places]).to(self._device)
        if old:
            width = max(step.lengths)
            seen = torch.arange(width, device=self._device)
            self._mask = (seen <= self._place[:old, None])[:, None, None]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any) -> Any:
        """As `Store.attend`."""
        keys, values = self._kept(self._keys, layer, key), self._kept(self._values, layer, value)
        old = len(self._step.lengths)
        if self._step.prompts:  # Whoever had their slots may have left infinities.
            new = slice(old, old + len(self._step.prompts))
            keys[new] = values[new] = 0
        keys[self._row, :, self._place] = key
        values[self._row, :, self._place] = value
        found = []
        if old:
            width = self._mask.shape[-1]
            queries = _grouped(query[:old], key.shape[1])
            mask = self._mask.expand(-1, -1, queries.shape[2], -1)
            out = scaled_dot_product_attention(
                queries, keys[:old, :, :width], values[:old, :, :width], attn_mask=mask, scale=scale
            )
            found.append(out.reshape(old, query.shape[1], -1))
        found += _of_prompts(self._step.prompts, query[old:], key[old:], value[old:], scale)
        return torch.cat(found) if len(found) > 1 else found[0]

    def _rounded(self, length: int) -> int:
        return -(-length // self.GRAIN) * self.GRAIN

    def _resize(self, slots: int, length: int) -> None:
        used, common = min(len(self._rows), slots), min(length, self._length)
        stores = self._keys, self._values
        try:
            for kept in stores:
                for layer, old in kept.items():
                    # Zeros: what a mask hides is still multiplied, and must be a number.
                    new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
                    new[:used, :, :common] = old[:used, :, :common]
                    kept[layer] = new
        except BaseException:  # One after the other, since all at once would take twice the memory: some are as before.
            slots, length = min(slots, self._slots), common
            for kept in stores:
                kept.update({layer: each[:slots, :, :length] for layer, each in kept.items()})
            raise
        finally:
            self._slots, self._length = slots, length

    def _kept(self, kept: dict[int, torch.Tensor], layer: int, like: torch.Tensor) -> torch.Tensor:
        found = kept.get(layer)
        if found is None:
            found = kept[layer] = like.new_zeros(self._slots, like.shape[1], self._length, like.shape[2])
        return found


class RowsCache(Cache):  # type: ignore[misc]
    """What a model is given as its cache: attention finds what it needs in the store by itself."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is new."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """Return 0: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return sizes of a mask that nobody makes."""
        return int(query_length if isinstance(query_length, int) else query_length.shape[0]), 0


_RUNNING = threading.local()

OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux", "cross_attention", "attention_bias", "chunk_size")
"""What attention functions are told by models whose attention is not that of `Store.attend`."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' models ask: tensors of shape (1, heads, tokens, size of a head)."""
    if attention_mask is not None or query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise Unsupported("it makes a mask or has keys of its own")
    for name in OTHER_ATTENTION:
        if others.get(name) is not None:
            raise Unsupported(f"its attention has {name}")
    store: Store = _RUNNING.store
    _RUNNING.layers.add(module.layer_idx)
    by_token = [each[0].transpose(0, 1) for each in (query, key, value)]
    out = store.attend(module.layer_idx, by_token[0], by_token[1], by_token[2], scaling)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


@contextlib.contextmanager
def attending(config: Any, store: Store) -> Iterator[set[int]]:
    """Have a model of this configuration attend by a store; yields the set of layers that did."""
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    _RUNNING.store, _RUNNING.layers = store, set()
    try:
        yield _RUNNING.layers
    finally:
        config._attn_implementation = before
        _RUNNING.store = None
