"""The streaming example: its model speaks the same alone and in company, and a small conversation becomes a page."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "streaming"))

pytest.importorskip("transformers")

import page
import speaker
import streaming
from happenings import Happenings, Speech
from typer.testing import CliRunner

from ctxflow.on_worker import Turn


@pytest.fixture(scope="module")
def model():
    return speaker.speaker(hidden=64, layers=2).build()


def speak(model, prompts, rounds):
    """What each session says in so many chunks, and the states at the end."""
    states, said = [None] * len(prompts), [[] for _ in prompts]
    for number in range(rounds):
        made = speaker.next_words(model, states, [[prompt] if not number else [] for prompt in prompts])
        states = [state for _, state in made]
        for mine, (chunk, _) in zip(said, made, strict=True):
            mine.append(chunk.chunk if isinstance(chunk, Turn) else chunk)
    return said, states


def test_sessions_say_the_same_alone_and_together(model):
    prompts = [("the sea at night", 999), ("a", 999), ("who keeps the light in the harbour of the west", 999)]
    together, _ = speak(model, prompts, 8)
    assert together == [speak(model, [prompt], 8)[0][0] for prompt in prompts]
    assert len({chunk for said in together for chunk in said}) > 15  # They do not repeat themselves.


def test_no_more_than_the_window_is_remembered(model):
    _, [state] = speak(model, [("the sea", 1000)], 20)
    assert state.keys.shape[3] <= speaker.WINDOW + speaker.CHUNK_WORDS
    assert state.position == 2 + 20 * speaker.CHUNK_WORDS - 1


def test_a_turn_ends_with_the_words_that_were_asked_for(model):
    chunks, state = [], None
    while not chunks or not isinstance(chunks[-1], Turn):
        [(chunk, state)] = speaker.next_words(model, [state], [[("the sea", 15)] if not chunks else []])
        chunks.append(chunk)
    assert [len((c.chunk if isinstance(c, Turn) else c).split()) for c in chunks] == [6, 6, 3]


def test_the_page_escapes_what_users_say(tmp_path):
    seen = Happenings(0.0)
    seen.asked("Ada", "<b>why</b>")
    seen.heard(Speech("Ada", "the sea & the sky", 1.0, "local-1"))
    page.write(tmp_path / "page.html", seen)
    text = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;why" in text and "sea &amp; the" in text and speaker.NOTICE in text


@pytest.mark.timeout(120)
def test_a_small_conversation(tmp_path, monkeypatch):
    words = ["--users", "3", "--seconds", "1", "--workers", "2", "--hidden", "32", "--pace", "0.1"]
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(streaming.app, words)
    assert ended.exit_code == 0, ended.output
    assert "3 users got" in ended.output and "words are noise" in " ".join(ended.output.split())
    text = (tmp_path / "streaming.html").read_text()
    assert text.count("<details>") == 3 and "was taken away" in text
