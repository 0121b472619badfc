"""Write rows in batches by transformers' own loop, padded: for models whose cache cannot be held by rows."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers

from ctxflow.models.drawing import column, drawn, parameters
from ctxflow.models.own_settings import TURNED_OFF
from ctxflow.models.reading import rotary_limit
from ctxflow.models.results import OutOfMemoryError
from ctxflow.models.row_forward import other_settings
from ctxflow.models.running_batch import RunningRow, end_tokens
from ctxflow.models.transformers import InternalBatches, LoadedModel, left_padded


class PaddedBatches:
    """Rows that are written in internal batches, one after the other; it is asked as `RunningBatch` is.

    Rows are padded on the left, masked, and each draws its own random numbers. (Rounding differs a little with the size
    of an internal batch.) A model is tried first: if it does not heed the mask, only rows of equal lengths go together;
    if those spoil each other too, as RWKV's do in transformers 5, none. Nor do rows that would have each other's
    positions turned otherwise (`rotary_limit`).
    """

    def __init__(self, loaded: LoadedModel, workload: InternalBatches) -> None:
        self._loaded = loaded
        self._workload = workload
        self._waiting: collections.deque[RunningRow] = collections.deque()
        self._limit = rotary_limit(loaded.model.config)
        self._in_one = bool(other_settings(loaded))  # Some count from where `generate` begins.
        self._companions = _companions(loaded)
        self._last: list[RunningRow] = []  # What went through the model last.

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting

    def add(self, row: RunningRow) -> None:
        """Have a row wait behind those that wait."""
        if self._in_one:
            row.room = row.capacity
        self._waiting.append(row)

    def remove(self, row: RunningRow) -> None:
        """Forget a row that waits."""
        if row in self._waiting:
            self._waiting.remove(row)

    def run(self, rows: Sequence[RunningRow], *, at_once: bool = False) -> Iterator[RunningRow]:
        """Write rows to their ends; yield each as soon as it and all before it are there.

        :param at_once: nobody looks at one before all are there, so that any may be together.
        """
        for row in self._ended(rows, at_once):
            if row.error is not None:
                raise row.error
            yield row

    def _ended(self, rows: Sequence[RunningRow], at_once: bool) -> Iterator[RunningRow]:
        def write(numbers: list[int]) -> list[RunningRow]:
            chosen = [rows[number] for number in numbers]
            for part in self._parts(chosen):
                self._write(part)
            return chosen

        run: Any = self._workload.run if at_once else self._workload.run_each
        yield from run([row.room for row in rows], write)

    def step(self) -> list[RunningRow]:
        """Write an internal batch of the rows that wait, those most like the oldest in length; return what has ended.

        A row that has filled its room without having ended waits for one of twice the size, behind the others.
        """
        if not self._waiting:
            return []
        numbers = self._workload.next_batch([row.room for row in self._waiting])
        chosen = [self._waiting[number] for number in numbers]
        for row in chosen:
            self._waiting.remove(row)
        alone: RunningRow | None = None
        try:
            list(self._ended(chosen, at_once=True))
        except OutOfMemoryError as error:  # Of one row, which was tried alone.
            [alone] = self._last
            self._loaded.release()
            alone.does_not_fit(error)
        for row in reversed([row for row in chosen if not row.ended]):
            if row is alone:
                self._waiting.append(row)
            elif _remaining(row):
                self._waiting.appendleft(row)
            else:  # Behind the others, which may be shorter.
                row.room = min(row.capacity, 2 * row.room)
                self._waiting.append(row)
        return [row for row in chosen if row.ended]

    def _parts(self, rows: Sequence[RunningRow]) -> list[list[RunningRow]]:
        """Return the rows in parts, each of which may go through the model together."""
        parts: list[list[RunningRow]] = []
        for row in rows:
            part = next((each for each in parts if self._together([*each, row])), None)
            if part is None:
                parts.append(part := [])
            part.append(row)
        return parts

    def _together(self, rows: Sequence[RunningRow]) -> bool:
        lengths = [len(row.prompt) + len(row.written) for row in rows]
        if len(rows) > 1 and (
            self._companions == "none"
            or (self._companions == "equal" and len(set(lengths)) > 1)
            or len({row.off for row in rows}) > 1
        ):
            return False
        # Rows that have ended go on, padded, until the last of them has.
        most = max(lengths) + max(map(_remaining, rows))
        return self._limit is None or most <= self._limit or min(lengths) > self._limit

    def _write(self, rows: list[RunningRow]) -> None:
        loaded, self._last = self._loaded, rows
        off = [TURNED_OFF[name] for name in rows[0].off]
        ids, mask = left_padded([[*row.prompt, *row.written] for row in rows], loaded.pad_id, loaded.device)
        width = ids.shape[1]
        ends = end_tokens(loaded)
        finish = _Finish(loaded.tokenizer, rows, width, loaded.device)
        greedy = all(row.sampling.greedy for row in rows)
        written = loaded.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(map(_remaining, rows)),
            do_sample=False,  # sampling happens in _Sampler, whose draws do not depend on the other rows
            num_beams=1,
            eos_token_id=ends or None,
            pad_token_id=loaded.pad_id,
            logits_processor=transformers.LogitsProcessorList([] if greedy else [_Sampler(rows, width, loaded.device)]),
            stopping_criteria=transformers.StoppingCriteriaList([finish] if finish.needed else []),
            **{name: value for each in off for name, value in each.items()},
        )
        for row, tokens, stopped_at in zip(rows, written[:, width:].tolist(), finish.stopped_at, strict=True):
            _extend(row, tokens, ends, stopped_at)


def _companions(loaded: LoadedModel) -> str:
    """Return beside which rows a short one has the scores that it has alone: "any", those of "equal" length, "none"."""
    size = loaded.known_tokens or len(loaded.tokenizer)
    tolerance = 0.1 if torch.finfo(loaded.dtype).eps > 1e-4 else 1e-3
    short, equal, long = ([(7 * length + 3 * place) % size for place in range(length)] for length in (3, 3, 12))
    equal = equal[::-1]

    def scores(*rows: list[int]) -> Sequence[torch.Tensor]:
        """Return the first row's, behind the prompt and behind a token more."""
        ids, mask = left_padded(rows, loaded.pad_id, loaded.device)
        made = loaded.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=2,
            min_new_tokens=2,
            do_sample=False,
            num_beams=1,
            pad_token_id=loaded.pad_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return [each[0] for each in made.logits]

    def same(found: Sequence[torch.Tensor]) -> bool:
        return all((each - own).norm() <= tolerance * own.norm() for each, own in zip(found, alone, strict=True))

    with torch.inference_mode():
        alone = scores(short)
        if same(scores(short, long)):
            return "any"
        return "equal" if same(scores(short, equal)) else "none"


def _remaining(row: RunningRow) -> int:
    """Return how many more tokens a row has room for."""
    return row.room - len(row.prompt) - len(row.written)


def _extend(row: RunningRow, new: list[int], ends: Sequence[int], stopped_at: int | None) -> None:
    ids = new[: min(_remaining(row), stopped_at or len(new))]
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    row.unfit_since = None
    row.written += ids if end is None else ids[: end + 1]
    if end is not None or stopped_at is not None:
        row.finish_reason = "stop"
    elif len(row.written) >= row.sampling.max_new_tokens:
        row.finish_reason = "length"


class _Finish(transformers.StoppingCriteria):  # type: ignore[misc]
    """End a row where its room is filled or at one of its stop strings."""

    def __init__(self, tokenizer: Any, rows: Sequence[RunningRow], width: int, device: torch.device) -> None:
        limits = [_remaining(row) for row in rows]
        self._tokenizer = tokenizer
        self._width = width
        self._limits = torch.tensor(limits, device=device)
        self._rows = rows
        self._stopping = any(row.sampling.stop for row in rows)
        # For each row the number of new tokens at which a stop string was complete.
        self.stopped_at: list[int | None] = [None] * len(rows)
        self.needed = self._stopping or min(limits) < max(limits)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self._width
        done = self._limits <= new
        if not self._stopping:
            return done
        longest = max(row.tail for row in self._rows)
        for row, tail in enumerate(input_ids[:, self._width :][:, -longest:].tolist()):
            if (
                self.stopped_at[row] is None
                and new <= self._limits[row]
                and self._rows[row].stops([*self._rows[row].written[-longest:], *tail], self._tokenizer)
            ):
                self.stopped_at[row] = new
        return done | torch.tensor([place is not None for place in self.stopped_at], device=input_ids.device)


class _Sampler(transformers.LogitsProcessor):  # type: ignore[misc]
    """Draw each row's next token and leave it as the only one possible; greedy rows keep their logits."""

    def __init__(self, rows: Sequence[RunningRow], width: int, device: torch.device) -> None:
        self._width = width
        self._greedy = column([row.sampling.greedy for row in rows], device)
        self._parameters = parameters([row.sampling for row in rows], device)
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self._width
        draws = column([row.draw(len(row.written) + step) for row in self._rows], scores.device)
        found = drawn(scores, draws, *self._parameters)
        chosen = torch.full_like(scores, float("-inf")).scatter_(1, found, 0.0)
        return torch.where(self._greedy, scores, chosen)
