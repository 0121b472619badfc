"""A program that has numbered rows answered by llama.cpp's server, and goes on where it was stopped.

    llama_driver.py MODEL ROWS RESUME [--until FILE] [--site FILE] [--workers N] [--server PROGRAM]

It prints JSON, a line each time: where its run is; twice a second, how far it is; at last, what came of it. With
--until there are more rows until that file is there. Tests kill it and what it starts, on this machine and in the
testbed, and ask what it asks.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import logging
import os
import threading
import time

from ctxflow import ContextExecutor, item_app
from ctxflow.models import server

WINDOW = 8
PAUSE = 0.2
"""Seconds between the requests of one row: it asks several times, as an agent does."""
LONG, LONG_EVERY = 75, 40
"""How often a long row asks, and which rows are long: one that just began cannot end in a grace of ten seconds."""
AHEAD = 100
"""How many rows there are, beyond those that are done, where their number is open."""


def long_turns(number, rows):
    """How often a long row asks, 0 for others: long ones are of the first half, so as not to end after all others."""
    return LONG if number % LONG_EVERY == 7 and number < rows // 2 else 0


def turns_of(number, rows):
    """How often a row asks."""
    return long_turns(number, rows) or 1 + number * 7 % 5


def asking(program, model, staged=False, unresponsive_seconds=60.0):
    """The app that has a row answered: its number, and how many tokens it got.

    :param staged: whether the model's file is brought to the workers.
    """
    command = f"{program} --threads 1 -c 4096 -np {WINDOW}"
    recipe = server.options(concurrency=WINDOW, load_timeout=120, **({"files": {"model": model}} if staged else {}))
    given = {} if staged else {"model": str(model)}

    @item_app(recipe(command, unresponsive_seconds=unresponsive_seconds, **given))
    async def ask(engine, number, turns):
        import asyncio

        tokens = 0
        for turn in range(turns):
            body = {"prompt": f"Row {number}, for the {turn}th time", "max_tokens": 24, "ignore_eos": True}
            answer = await engine.answer("/v1/completions", body)
            tokens += answer["usage"]["completion_tokens"]
            await asyncio.sleep(PAUSE)
        return number, tokens

    return ask


def right(number, answer, rows):
    """Whether a row's answer is its own, and whole."""
    return tuple(answer) == (number, 24 * turns_of(number, rows))


def _tell(**what):
    print(json.dumps(what), flush=True)


def _watch(executor, ended, times):
    while not ended.wait(0.5):
        _tell(there=executor.status().workers, done=len(times))


def open_numbers(rows, until, done):
    """The numbers of at least so many rows, and of more until a file is there, a few ahead of those that are done."""
    for number in itertools.count():
        while number >= max(rows, len(done) + AHEAD) and not os.path.exists(until):
            time.sleep(0.05)
        if number >= rows and os.path.exists(until):
            return
        yield number


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows", type=int)
    parser.add_argument("resume")
    parser.add_argument("--until")
    parser.add_argument("--site")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--server", default="llama-server")
    parser.add_argument("--unresponsive", type=float, default=60.0)
    asked = parser.parse_args()
    logging.basicConfig(format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    ask = asking(asked.server, asked.model, staged=True, unresponsive_seconds=asked.unresponsive)
    times, wrong = collections.Counter(), []
    numbers = range(asked.rows) if asked.until is None else open_numbers(asked.rows, asked.until, times)
    ended = threading.Event()
    with ContextExecutor(site=asked.site, workers=asked.workers) as executor:
        _tell(directory=executor.calls.run.directory, pid=os.getpid())
        watcher = threading.Thread(target=_watch, args=(executor, ended, times), daemon=True)
        watcher.start()
        numbers, again = itertools.tee(numbers)
        turns = (turns_of(number, asked.rows) for number in again)
        for number, answer in ask.map(numbers, turns, resume=asked.resume, order="completed"):
            times[number] += 1
            if not right(number, answer, asked.rows):
                wrong.append([number, answer])
        ended.set()
        watcher.join()
    _tell(
        missing=[number for number in range(max(asked.rows, max(times, default=0) + 1)) if not times[number]][:20],
        repeated=[number for number, count in times.items() if count > 1][:20],
        wrong=wrong[:20],
        done=len(times),
    )


if __name__ == "__main__":
    main()
