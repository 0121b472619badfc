"""A program with mistakes that mypy is to find: `# error` stands in each line that has one, and in no other."""

from __future__ import annotations

from ctxflow import ContextExecutor, batch_app, context, context_app, session_app


@context
def lexicon(language: str) -> dict[str, int]:
    return {}


@context(memroy="8 GB")  # error
def misspelt() -> int:
    return 1


@batch_app(lexicon("en"))
def look_up(known: dict[str, int], words: list[str], *, default: int = 0) -> list[int]:
    return [known.get(word, default) for word in words]


look_up()  # error
look_up("a", defualt=1)  # error
look_up.map(["a"], order="compleeted")  # error
look_up.options(priorty=1)  # error
look_up.options(level="persuasive")  # error


@batch_app(lexicon("en"))  # error
def of_other_context(known: list[str], words: list[str]) -> list[int]:
    return []


@batch_app  # error
def no_results(words: list[str]) -> int:
    return 1


@context_app(lexicon("en"))
def size(known: dict[str, int], at_least: int) -> int:
    return max(len(known), at_least)


size("many")  # error
size(1).result().upper()  # error


@session_app
def count(states: list[int | None], prompts: list[list[int]]) -> list[tuple[int, int]]:
    return []


count.open("three")  # error
count.options(ahaed=1)  # error

ContextExecutor(rooting="least-loaded")  # error
ContextExecutor(routing=3)  # error
ContextExecutor(level="persuasive")  # error
