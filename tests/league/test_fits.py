"""What is shipped of public traces is what `benchmarks/league_fits.py` makes of them, where they are at hand."""

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(not (DATA / "spot").is_dir(), reason="the traces are not here")
def test_the_fits_are_made_again_of_the_traces():
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "league_fits.py"), str(DATA)], capture_output=True, check=True
    )
    shipped = importlib.resources.files("ctxflow.league").joinpath("fits.json").read_text()
    assert json.loads(made.stdout) == json.loads(shipped)


def test_what_is_shipped_names_its_sources_and_their_licences():
    shipped = json.loads(importlib.resources.files("ctxflow.league").joinpath("fits.json").read_text())
    assert "CC BY 4.0" in shipped["azure"]["source"] and "Microsoft" in shipped["azure"]["source"]
    assert "none is shipped" in shipped["spot"]["source"]
    for zone in shipped["spot"].values():
        if isinstance(zone, dict):
            assert set(zone) == {"nodes", "states"} and all(
                sum(state["then"].values()) == pytest.approx(1.0, abs=0.01) for state in zone["states"].values()
            )
