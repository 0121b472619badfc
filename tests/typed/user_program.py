"""A program as a user writes it, checked by mypy --strict: what is said of each `reveal_type` is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ctxflow import Context, ContextExecutor, batch_app, context, context_app, idle, session_app

if TYPE_CHECKING:
    from typing_extensions import reveal_type


class Encoder:
    def encode(self, texts: Sequence[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]


@context(gpus=1, memory="8 GB", env={"OMP_NUM_THREADS": 4}, files={"weights": "model/"})
def encoder(name: str, weights: str) -> Encoder:
    return Encoder()


@context
def index(encoder: Encoder, texts: list[str]) -> dict[str, list[float]]:
    return dict(zip(texts, encoder.encode(texts), strict=True))


recipe = encoder("small")
reveal_type(recipe)  # Context[Encoder]
reveal_type(index(recipe, ["a"]))  # Context[dict[str, list[float]]]
reveal_type(encoder.options(gpus=2, env={"N": "1"})("large"))  # Context[Encoder]
reveal_type(recipe.build())  # Encoder


@batch_app(recipe, priority=3, level="pervasive")
def embed(model: Encoder, texts: list[str], *, normal: bool = False) -> list[list[float]]:
    return model.encode(texts)


reveal_type(embed)  # BatchApp[[texts: list[str], *, normal: bool = ...], list[float]]
reveal_type(embed("a", normal=True))  # Future[list[float]]
reveal_type(embed.options(timeout=60))  # BatchApp[[texts: list[str], *, normal: bool = ...], list[float]]
reveal_type(embed.using(encoder("large")))  # BatchApp[[texts: list[str], *, normal: bool = ...], list[float]]
reveal_type(embed.map(["a"]))  # MapResult[list[float]]
reveal_type(embed.map(["a"], on_error="return"))  # MapResult[list[float] | Exception]
reveal_type(embed.map(["a"], order="completed"))  # MapResult[tuple[int, list[float]]]
both = embed.map(["a"], order="completed", on_error="return")
reveal_type(both)  # MapResult[tuple[int, list[float] | Exception]]


@batch_app
def longer(left: Sequence[str], right: Sequence[str]) -> Iterator[bool]:
    for one, other in zip(left, right, strict=True):
        yield len(one) > len(other)


reveal_type(longer("a", "b"))  # Future[bool]
text: Future[str] = Future()
reveal_type(longer(text, "b"))  # Future[bool]


@batch_app(retries=2)
def untyped(rows: Any) -> Any:
    return rows


reveal_type(untyped({"a": 1}))  # Future[Any]


@batch_app
def total(*columns: list[int]) -> list[int]:
    return [sum(each) for each in zip(*columns, strict=True)]


reveal_type(total(1, 2, 3, 4, 5))  # Future[int]


@context_app(recipe)
def nearest(model: Encoder, text: str, count: int = 1) -> list[str]:
    return [text] * count


reveal_type(nearest("a", count=2))  # Future[list[str]]
reveal_type(nearest(text))  # Future[list[str]]
reveal_type(nearest.options(priority=1))  # ContextApp[[text: str, count: int = ...], list[str]]


@context_app
def plain() -> int:
    return 1


reveal_type(plain())  # Future[int]


@session_app(recipe, ahead=4)
def speak(model: Encoder, states: list[int | None], prompts: list[list[str]]) -> Iterator[tuple[str, int]]:
    for state, new in zip(states, prompts, strict=True):
        yield ("word" if new else idle("done")), (state or 0) + 1


reveal_type(speak)  # SessionApp[str, str]
reveal_type(speak.options(keep_every=4))  # SessionApp[str, str]
with ContextExecutor(workers=1), speak.open("begin") as session:
    reveal_type(session)  # Session[str, str]
    reveal_type(session.take(10))  # str
    session.prompt("go on")
    for chunk in session:
        reveal_type(chunk)  # str


async def collect() -> list[list[float]]:
    results = embed.map(["a"])
    reveal_type(results.answered)  # dict[str, int]
    return [each async for each in results]


asyncio.run(collect())


def run(which: Context[Encoder], many: list[str]) -> Iterator[list[float]]:
    results = embed.options(which).map(many, resume="results.jsonl", window=100)
    for vector in results:
        yield [2 * each for each in vector]
    results.close()


def of_any(which: Context) -> Context:
    return which


with ContextExecutor("local", workers=2, routing="least-loaded", batching={"policy": "fixed", "size": 10}) as executor:
    reveal_type(executor)  # ContextExecutor
