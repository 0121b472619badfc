"""Several people talk to one small streaming model at a time; their sessions move, sleep, and survive their workers.

The command line and the people live here. The model is in speaker.py, the live view in screen.py, the page in page.py.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import page
import screen
import speaker
import typer
from happenings import Happenings, Speech
from rich.console import Console

from ctxflow import ContextExecutor, CtxflowError
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.sessions import Session, SessionApp

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hope", "Ida", "Jon", "Kay", "Lou")
QUESTIONS = (
    "what does the sea say at night",
    "who keeps the light in the harbour",
    "where does the river go from here",
    "tell me of snow on the hill",
    "is there a boat under the bridge",
    "what comes with the morning tide",
)
app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


class Person(threading.Thread):
    """Somebody who asks, listens, thinks, and asks again; now and then away for a while, with the session suspended."""

    def __init__(
        self, name: str, stream: SessionApp, seen: Happenings, words: int, pace: float, stop: threading.Event
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._seen, self._words, self._pace, self._stop_talking = seen, words, pace, stop
        self._luck = random.Random(name)
        self.session: Session = stream.open(self._question())

    def run(self) -> None:
        """Talk until it is over."""
        try:
            self._listen()
            while not self._stop_talking.is_set():
                self.session.prompt(self._question())
                self._listen()
                self._pause(self._luck.uniform(0.2, 2.0))
                if self._luck.random() < 0.3 and not self._stop_talking.is_set():
                    self.session.suspend()
                    self._seen.note(self.name, "suspended")
                    self._pause(self._luck.uniform(1.0, 3.0))
                    self.session.resume()
                    self._seen.note(self.name, "resumed")
        except CtxflowError as error:
            self._seen.note(self.name, f"ended: {error}")
        finally:
            self.session.close()

    def _question(self) -> tuple[str, int]:
        """What to ask, and how many words to wish for."""
        question = self._luck.choice(QUESTIONS)
        self._seen.asked(self.name, question)
        return question, self._luck.randrange(self._words // 2, 2 * self._words)

    def _listen(self) -> None:
        for text in self.session:
            status = self.session.status
            self._seen.heard(Speech(self.name, text, time.monotonic(), status.worker if status else None))
            self._pause(self._pace)  # Nobody reads faster; meanwhile a few chunks are made ahead.
            if self._stop_talking.is_set():
                return

    def _pause(self, seconds: float) -> None:
        self._stop_talking.wait(seconds)


def direct(executor: ContextExecutor, seen: Happenings, seconds: float, evict: bool, stop: threading.Event) -> None:
    """From the first words on: halfway a worker is taken away, and at last the conversations end."""
    while not seen.chunks and not stop.wait(0.1):
        pass
    stop.wait(seconds / 2)
    if evict and isinstance(executor.engine, EmbeddedEngine):
        seen.evicted(executor.engine.evict(seconds=2.0))
    stop.wait(seconds / 2)
    stop.set()


def _names(users: int) -> list[str]:
    return [NAMES[n % len(NAMES)] + (str(n // len(NAMES) + 1) if n >= len(NAMES) else "") for n in range(users)]


@app.command()
def main(
    users: Annotated[int, typer.Option(min=1, max=200, help="How many people talk at a time.")] = 6,
    seconds: Annotated[float, typer.Option(min=1, help="How long they talk.")] = 30.0,
    workers: Annotated[int, typer.Option(min=1, help="Workers on this machine.")] = 2,
    site: Annotated[str, typer.Option(help="Where to run: local, or a site file.")] = "local",
    placement: Annotated[str, typer.Option(help="The sessions' policy: least-loaded or turboserve.")] = "turboserve",
    pace: Annotated[float, typer.Option(min=0, help="Seconds in which a person reads six words.")] = 0.25,
    words: Annotated[int, typer.Option(min=2, help="Words of an answer, about.")] = 60,
    hidden: Annotated[int, typer.Option(help="The model's width, a multiple of 32.")] = 128,
    chunk_target: Annotated[float, typer.Option(help="Seconds that a chunk of six words may take.")] = 0.2,
    evict: Annotated[bool, typer.Option(help="Take a worker away halfway, without a word.")] = True,
    output: Annotated[Path, typer.Option(help="The page that is written at the end.")] = Path("streaming.html"),
) -> None:
    """Watch several people's sessions on one small streaming model of random weights: its words are noise."""
    console = Console()
    stream = speaker.app(chunk_target=chunk_target, hidden=hidden)
    seen = Happenings(time.monotonic())
    # Sessions of one model share a worker's library process, and the model's calls.
    with ContextExecutor(site, workers=workers, sessions=placement) as executor:
        stop = threading.Event()
        people = [Person(name, stream, seen, words, pace, stop) for name in _names(users)]
        director = threading.Thread(target=direct, args=(executor, seen, seconds, evict, stop), daemon=True)
        for thread in (*people, director):
            thread.start()
        try:
            screen.watch(console, people, executor, seen)
        except KeyboardInterrupt:
            console.print("stopped; the page has what was said until now")
        stop.set()
    page.write(output, seen)
    console.print(screen.summary(seen))
    console.print(f"The page: {output}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(app())
