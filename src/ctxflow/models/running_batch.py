"""A batch that rows enter and leave while it runs: one that has ended makes room for one that waits.

Each step takes every row a token further, and reads the prompts of those that have just entered, in one pass through
the model without padding. What a row is answered depends neither on those beside it nor on when it entered.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ctxflow.errors import ItemRefused
from ctxflow.models.batch_limits import AHEAD, Ceiling, too_little_memory
from ctxflow.models.drawing import LARGEST_BELOW_ONE, column, drawn, parameters
from ctxflow.models.own_settings import OwnSettings
from ctxflow.models.results import OutOfMemoryError, Sampling, Uniforms
from ctxflow.models.row_cache import make_store
from ctxflow.models.row_forward import RowsForward
from ctxflow.models.transformers import LoadedModel

CPU_PROMPT_TOKENS = 512  # Prompts that enter in one step, on a CPU: more gain nothing (measured).
GPU_PROMPT_TOKENS = 8192
NO_TOKEN = -1
ALONE_SECONDS = 10.0  # How long a row is tried again that does not fit alone,
_ALONE_PAUSE = 0.05  # and the pause behind each try.
T = TypeVar("T")


class Constraint(Protocol):
    """What a row may write. What it raises is the row's own error."""

    def allowed(self, tokens: int) -> torch.Tensor:
        """Return which of so many tokens may come next, as bools."""

    def take(self, token: int) -> bool:
        """Go on behind a token; return whether nothing more may come."""


class RunningRow:
    """A prompt and what is written for it.

    :param top: tokens whose log-probabilities are kept at each place, beside that of the one that was taken; None for
        none at all.
    :param off: what of the model's own settings does not hold for it, of `ctxflow.models.own_settings.TURNED_OFF`.
    :param likely: how many tokens it may write before it needs more room, where its limit is far away; None: all.
    :ivar written: the tokens so far.
    :ivar logprobs: for each of them its log-probability, and those of the likeliest tokens.
    :ivar finish_reason: "stop" or "length", once it has ended.
    :ivar error: why it ended without.
    :ivar room: how many tokens it has room for.
    :ivar unfit_since: when it first did not fit alone, since it wrote last.
    :ivar draws: the numbers by which its tokens are drawn, None for a greedy row.
    :ivar tail: the last so many tokens hold a stop string that has just been written.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        constraint: Constraint | None = None,
        top: int | None = None,
        off: Collection[str] = (),
        likely: int | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.sampling = sampling
        self.constraint = constraint
        self.top = top
        self.off = frozenset(off)
        self.written: list[int] = []
        self.logprobs: list[tuple[float, list[tuple[int, float]]]] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.room = self.capacity if likely is None else min(self.capacity, len(self.prompt) + likely)
        self.unfit_since: float | None = None
        self.draws = None if sampling.greedy else Uniforms(sampling, prompt)
        # A token is at least a byte of text, so that many tokens hold the whole stop string; four more keep a
        # tokenizer that drops leading spaces from dropping the stop string's.
        self.tail = 4 + max((len(stop.encode()) for stop in sampling.stop), default=0)

    @property
    def ended(self) -> bool:
        """Whether nothing more is written."""
        return self.finish_reason is not None or self.error is not None

    @property
    def capacity(self) -> int:
        """How many tokens it may have in the end."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def draw(self, number: int) -> float:
        """Return the number by which a token is drawn."""
        draws = self.draws
        return 0.0 if draws is None else self._own(lambda: min(draws[number], LARGEST_BELOW_ONE), 0.0)

    def allowed(self, tokens: int) -> torch.Tensor:
        """Return which of so many tokens may come next, as bools."""
        constraint, every = self.constraint, torch.ones(tokens, dtype=torch.bool)
        return every if constraint is None else self._own(lambda: constraint.allowed(tokens), every)

    def stops(self, written: Sequence[int], tokenizer: Any) -> bool:
        """Return whether a stop string stands at the end of what was written."""

        def found() -> bool:
            tail = decoded(tokenizer, written[-self.tail :])
            return any(stop in tail for stop in self.sampling.stop)

        return bool(self.sampling.stop) and self._own(found, True)

    def take(self, token: int, ends: frozenset[int], tokenizer: Any) -> None:
        """Write a token, and see whether the row has ended."""
        self.written.append(token)
        self.unfit_since = None
        constraint = self.constraint
        whole = constraint is not None and token not in ends and self._own(lambda: constraint.take(token), True)
        if self.stops(self.written, tokenizer) or whole or token in ends:
            self.finish_reason = "stop"
        elif len(self.written) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def does_not_fit(self, error: OutOfMemoryError) -> None:
        """Note that the device has no room for it alone; it ends with that where it has had none for some time.

        Another program on the device may have taken the memory for a while.
        """
        now = time.monotonic()
        if self.unfit_since is None:
            self.unfit_since = now
        if now - self.unfit_since >= ALONE_SECONDS:
            self.error = error
        else:
            time.sleep(_ALONE_PAUSE)

    def _own(self, compute: Callable[[], T], otherwise: T) -> T:
        """Return what its own values make; what that raises is its own error, and ends no other row."""
        try:
            return compute()
        except Exception as error:
            self.error = self.error or error
            return otherwise


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens without special ones."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class RunningBatch:
    """The rows that a model writes, and those that wait; callers in several threads share it.

    :param most_tokens: returns how many tokens the rows may have together in the end; asked when none are running.
    :param max_rows: rows at a time, None for any number.
    :raises ctxflow.models.row_cache.Unsupported: for a model whose cache cannot be held so, in a few words.
    """

    def __init__(self, loaded: LoadedModel, most_tokens: Callable[[], int], max_rows: int | None = None) -> None:
        self._loaded = loaded
        self._most_tokens = most_tokens
        self._max_rows = max_rows
        self._ends = frozenset(end_tokens(loaded))
        self._settings = OwnSettings(loaded)
        self._forward = RowsForward(loaded)
        self._prompt_tokens = CPU_PROMPT_TOKENS if loaded.device.type == "cpu" else GPU_PROMPT_TOKENS
        self._store = make_store(loaded.device, loaded.dtype)
        self._rows: list[RunningRow] = []  # In the store's order.
        self._waiting: collections.deque[RunningRow] = collections.deque()
        self._most = 0  # As it was when none were running.
        self._ceiling = Ceiling()
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._rows and not self._waiting

    def add(self, row: RunningRow) -> None:
        """Have a row wait behind those that wait."""
        self._waiting.append(row)

    def remove(self, row: RunningRow) -> None:
        """Forget a row."""
        with self._lock, torch.inference_mode():
            if row in self._rows:
                self._leave(row)
            elif row in self._waiting:
                self._waiting.remove(row)

    def run(self, rows: Sequence[RunningRow], *, at_once: bool = False) -> Iterator[RunningRow]:
        """Write rows to their ends; yield each as soon as it and all before it are there.

        Rows that may become the longest enter first among those that are looked at together.

        :param at_once: nobody looks at one before all are there, so that all are looked at together.
        :raises OutOfMemoryError: if one row alone does not fit.
        """
        fed = 0
        try:
            for row in rows:
                while not row.ended:
                    if not self._waiting and fed < len(rows):
                        chunk = rows[fed:] if at_once else self._chunk(rows, fed)
                        fed += len(chunk)
                        for each in sorted(chunk, key=lambda each: -each.sampling.max_new_tokens):
                            self.add(each)
                    self.step()
                if row.error is not None:
                    raise row.error
                yield row
        finally:
            for row in rows[:fed]:
                if not row.ended:
                    self.remove(row)

    def _chunk(self, rows: Sequence[RunningRow], first: int) -> Sequence[RunningRow]:
        most, end, tokens = AHEAD * (self._most or self._most_tokens()), first, 0
        while end < len(rows) and tokens < most:
            tokens += rows[end].capacity
            end += 1
        return rows[first:end]

    def step(self) -> list[RunningRow]:
        """Take every row a token further, and return those that ended."""
        with self._lock, torch.inference_mode():
            self._grow()
            unfit: list[RunningRow] = []
            entering, full = self._entering(unfit)
            if not self._rows:
                return unfit
            try:
                tokens = self._choose(self._scores(entering))
            except torch.cuda.OutOfMemoryError as error:
                reason = _reason(error)
            else:
                if full:
                    self._ceiling.fitted(self._most)
                return unfit + self._take(tokens)
            # Outside the clause: with the error went the frames that held tensors.
            return unfit + self._shrink(reason)

    def _grow(self) -> None:
        """Have rows that have filled their room wait for one of twice the size; what they wrote is not lost."""
        for row in [row for row in self._rows if len(row.prompt) + len(row.written) > row.room]:
            row.room = min(row.capacity, 2 * row.room)
            self._leave(row)
            self._waiting.appendleft(row)

    def _entering(self, unfit: list[RunningRow]) -> tuple[int, bool]:
        """Let rows in that wait; return how many, and whether others wait for room.

        :param unfit: gets one that does not fit alone, and ends.
        """
        if not self._rows and self._waiting:
            self._most = self._most_tokens()
        entered = tokens = 0
        while self._waiting and (self._max_rows is None or len(self._rows) < self._max_rows):
            row, budget = self._waiting[0], self._ceiling.limit(self._most)
            new = len(row.prompt) + len(row.written)
            if entered and tokens + new > self._prompt_tokens:
                break
            if self._rows and self._store.size(row.room) > budget:
                return entered, True
            if reason := self._no_room(row, budget):
                if self._rows:
                    self._ceiling.lower(self._store.size(row.room), self._store.size())
                else:
                    unfit += self._alone(self._waiting.popleft(), reason)
                return entered, False
            self._rows.append(self._waiting.popleft())
            entered += 1
            tokens += new
        return entered, False

    def _no_room(self, row: RunningRow, budget: int) -> str:
        """Make room for another row; return why there is none, "" if there is."""
        stored = False
        try:
            self._store.enter(row.room, budget)
            stored = True
            self._settings.enter(row)
        except torch.cuda.OutOfMemoryError as error:
            reason = _reason(error)
        else:
            return ""
        if stored:
            self._store.leave(len(self._rows))
        self._loaded.release()
        return reason

    def _alone(self, row: RunningRow, reason: str) -> list[RunningRow]:
        """Have a row that does not fit alone wait behind the others; return it if it ends instead."""
        row.does_not_fit(too_little_memory(reason))
        if row.ended:
            return [row]
        self._waiting.append(row)
        return []

    def _shrink(self, reason: str) -> list[RunningRow]:
        """Have half of the rows wait again; what they wrote is not lost."""
        if len(self._rows) == 1:
            [row] = self._rows
            self._leave(row)
            self._loaded.release()
            return self._alone(row, reason)
        kept, tried = len(self._rows) // 2, self._store.size()
        for row in self._rows[: kept - 1 : -1]:
            self._leave(row)
            self._waiting.appendleft(row)
        self._ceiling.lower(tried, self._store.size())
        # Those that stay may have entered in this step: all are read anew.
        for row in list(self._rows)[::-1]:
            self._leave(row)
            self._waiting.appendleft(row)
        self._loaded.release()
        return []

    def _take(self, tokens: Sequence[int]) -> list[RunningRow]:
        ended = []
        for row, token in zip(self._rows, tokens, strict=True):
            if token == NO_TOKEN:
                row.error = self._not_finite()
            else:
                row.take(token, self._ends, self._loaded.tokenizer)
            if row.ended:
                ended.append(row)
        for row in ended:
            self._leave(row)
        return ended

    def _leave(self, row: RunningRow) -> None:
        number = self._rows.index(row)
        self._store.leave(number)
        self._settings.leave(number)
        last = self._rows.pop()
        if number < len(self._rows):
            self._rows[number] = last

    def _scores(self, entering: int) -> torch.Tensor:
        old = len(self._rows) - entering
        going = [(row.written[-1], len(row.prompt) + len(row.written)) for row in self._rows[:old]]
        scores: torch.Tensor = self._forward(
            self._store, going, [[*row.prompt, *row.written] for row in self._rows[old:]]
        )
        return scores

    def _not_finite(self) -> ItemRefused:
        dtype = str(self._loaded.dtype).removeprefix("torch.")
        return ItemRefused(
            f"the model's scores behind this text are not finite numbers in {dtype}: give a dtype in which they are, "
            "such as float32"
        )

    def _choose(self, raw: torch.Tensor) -> list[int]:
        """Return the next token of each row; `NO_TOKEN` where the scores are not finite."""
        scores, tokens = raw, raw.argmax(dim=-1)
        # Of scores that are not numbers, one is the largest; some models rule out tokens by minus infinity.
        finite = raw.gather(1, tokens[:, None])[:, 0].isfinite()
        if self._settings or any(row.constraint is not None for row in self._rows):
            scores = self._processed(raw.float().clone())
            tokens = scores.argmax(dim=-1)
        drawing = [number for number, row in enumerate(self._rows) if not row.sampling.greedy]
        if drawing:
            device = scores.device
            chosen = [self._rows[number] for number in drawing]
            where = torch.tensor(drawing, device=device)
            draws = column([row.draw(len(row.written)) for row in chosen], device)
            found = drawn(scores[where], draws, *parameters([row.sampling for row in chosen], device))
            tokens[where] = found[:, 0]
        self._keep_logprobs(raw, tokens)
        return [int(token) for token in tokens.where(finite, NO_TOKEN).tolist()]

    def _processed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores as the model's generation settings change them, and with what rows may not write left out."""
        if self._settings:
            scores = self._settings(scores, self._rows)
        bound = [number for number, row in enumerate(self._rows) if row.constraint is not None]
        if bound:
            allowed = [self._rows[number].allowed(scores.shape[1]) for number in bound]
            where = torch.tensor(bound, device=scores.device)
            scores[where] = scores[where].masked_fill(~torch.stack(allowed).to(scores.device), float("-inf"))
        return scores

    def _keep_logprobs(self, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep log-probabilities as the model has them, before temperatures and constraints."""
        asked = [number for number, row in enumerate(self._rows) if row.top is not None]
        if not asked:
            return
        where = torch.tensor(asked, device=scores.device)
        logs = torch.log_softmax(scores[where].float(), dim=-1)
        own = logs.gather(1, tokens[where, None])[:, 0].tolist()
        most = max(1, *(self._rows[number].top or 0 for number in asked), 1)
        best = logs.topk(min(most, logs.shape[1]))
        columns = zip(asked, own, best.indices.tolist(), best.values.tolist(), strict=True)
        for number, value, ids, values in columns:
            row = self._rows[number]
            row.logprobs.append((value, list(zip(ids, values, strict=True))[: row.top]))


def _reason(error: torch.cuda.OutOfMemoryError) -> str:
    return str(error).split("\n", maxsplit=1)[0] or type(error).__name__


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Return the tokens that end a text: as the model's generation settings say, else its tokenizer."""
    ends = loaded.model.generation_config.eos_token_id
    ends = loaded.tokenizer.eos_token_id if ends is None else ends
    return [int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends]) if end is not None]
