"""The page of a conversation of the streaming example: a lane for each user, coloured by worker, and what was said."""

from __future__ import annotations

import html
from pathlib import Path

import speaker
from happenings import Happenings

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
_LEFT, _WIDTH, _LANE = 90, 860, 26
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222; }
.notice { background: #fff3cd; padding: .5em 1em; border-radius: 4px; }
.said { margin: .2em 0 .8em 0; } .asked { font-weight: 600; } .note { color: #666; font-size: 13px; }
details { margin: .4em 0; } svg { width: 100%; height: auto; } .key span { margin-right: 1.2em; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } .notice { background: #4a3f10; } .note { color: #999; }
  svg text { fill: #ddd; } svg line { stroke: #444; }
}
"""


def write(path: Path, seen: Happenings) -> None:
    """Write the page."""
    path.write_text(render(seen), encoding="utf-8")


def render(seen: Happenings) -> str:
    """The page as HTML, which needs nothing beside itself."""
    workers = list(
        dict.fromkeys(speech.worker for each in seen.speeches.values() for speech in each if speech.worker is not None)
    )
    colours = {worker: _COLOURS[n % len(_COLOURS)] for n, worker in enumerate(workers)}
    key = "".join(f'<span><b style="color:{colours[each]}">&#9632;</b> {html.escape(each)}</span>' for each in workers)
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>Sessions of a streaming model</title><style>{_STYLE}</style></head><body>",
        "<h1>Sessions of a streaming model</h1>",
        f'<p class="notice">{speaker.NOTICE} What is real: the forward passes, the keys and values that each session '
        "keeps, and where they went.</p>",
        f"<p>{len(seen.users)} users, {seen.chunks} chunks of up to {speaker.CHUNK_WORDS} words. Each mark is a chunk, "
        "in the colour of the worker that carried its session. Circles are questions, grey bars suspensions, and the "
        "vertical lines workers that were taken away.</p>",
        f'<p class="key">{key}</p>',
        _lanes(seen, colours),
        *(_conversation(seen, user) for user in seen.users),
        "</body></html>",
    ]
    return "\n".join(parts)


def _lanes(seen: Happenings, colours: dict[str, str]) -> str:
    """Who got chunks when, and from where."""
    last = max((speech.at for each in seen.speeches.values() for speech in each), default=seen.began + 1)
    began = seen.first
    span = max(1.0, last - began)

    def x(at: float) -> float:
        return round(_LEFT + _WIDTH * min(1.0, max(0.0, (at - began) / span)), 1)

    height = _LANE * len(seen.users) + 30
    out = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" font-size="13" role="img" aria-label="Chunks over time">'
    ]
    for at, user, what in seen.notes:
        if not user:
            out.append(
                f'<line x1="{x(at)}" x2="{x(at)}" y1="0" y2="{height - 26}" stroke="#c00" stroke-dasharray="4 3">'
                f"<title>{html.escape(what)}</title></line>"
            )
    for lane, user in enumerate(seen.users):
        y = lane * _LANE + 6
        out.append(f'<text x="0" y="{y + 12}">{html.escape(user)}</text>')
        out.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y + 8}" y2="{y + 8}" stroke="#ddd"/>')
        for begin, end in _suspensions(seen, user, last):
            width = max(1, round(x(end) - x(begin), 1))
            out.append(
                f'<rect x="{x(begin)}" y="{y + 5}" width="{width}" height="6" fill="#bbb">'
                "<title>suspended</title></rect>"
            )
        for at, question in seen.turns[user]:
            out.append(
                f'<circle cx="{x(at)}" cy="{y + 8}" r="4" fill="none" stroke="#888">'
                f"<title>{html.escape(question)}</title></circle>"
            )
        for speech in seen.speeches[user]:
            fill = colours.get(speech.worker or "", "#999")
            out.append(
                f'<rect x="{x(speech.at)}" y="{y}" width="2.5" height="16" fill="{fill}">'
                f"<title>{html.escape(speech.text)}</title></rect>"
            )
    for tenth in range(0, 11, 2):
        at = began + span * tenth / 10
        out.append(f'<text x="{x(at)}" y="{height - 6}" text-anchor="middle">{span * tenth / 10:.0f} s</text>')
    return "".join([*out, "</svg>"])


def _suspensions(seen: Happenings, user: str, last: float) -> list[tuple[float, float]]:
    found, begun = [], None
    for at, whose, what in seen.notes:
        if whose == user and what == "suspended":
            begun = at
        elif whose == user and what == "resumed" and begun is not None:
            found.append((begun, at))
            begun = None
    return found if begun is None else [*found, (begun, last)]


def _conversation(seen: Happenings, user: str) -> str:
    """What a user asked and got."""
    turns = seen.turns[user]
    out = [f"<details><summary>{html.escape(user)}: {len(turns)} questions</summary>"]
    for number, (at, question) in enumerate(turns):
        until = turns[number + 1][0] if number + 1 < len(turns) else float("inf")
        said = " ".join(speech.text for speech in seen.speeches[user] if at <= speech.at < until)
        notes = "; ".join(what for when, whose, what in seen.notes if whose == user and at <= when < until)
        out.append(f'<div class="asked">{html.escape(question)}?</div><div class="said">{html.escape(said)}</div>')
        if notes:
            out.append(f'<div class="note">{html.escape(notes)}</div>')
    return "".join([*out, "</details>"])
