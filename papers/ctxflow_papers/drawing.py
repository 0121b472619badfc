"""Writing a paper's figures, as drawn from our own runs, to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.files import written_whole
from ctxflow.installing import how_to_install
from ctxflow.observe.measures import STYLE


def write_pictures(folder: Path, paper: str, pictures: Mapping[str, Callable[[Any], Any]]) -> None:
    """Draw pictures, and write them as PAPER-NAME.png.

    :param pictures: name -> what draws it, given matplotlib's class of figures.
    :raises CtxflowError: if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise CtxflowError(f"pictures need matplotlib: {how_to_install('matplotlib', extra='report')}") from None
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in pictures.items():
            with written_whole(folder / f"{paper}-{name}.png", sync=False) as file:
                draw(Figure).savefig(file, format="png", dpi=150)
