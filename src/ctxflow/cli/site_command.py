"""`ctxflow site`: whether a site file is right, what its batch systems have for it, and all that it says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ctxflow.cli.screen import AsJson
from ctxflow.errors import counted
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.factory.site_check import EnvironmentAnswer, ProbeAnswer
    from ctxflow.factory.tier_providers import TierAnswer
    from ctxflow.sites import Site

site = typer.Typer(name="site", help="Check a site file, and print all that it says.", no_args_is_help=True)
_File = Annotated[str, typer.Argument(metavar="FILE", help='A site file, or "local".')]


@site.command()
def check(
    file: _File,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Ask the batch systems too: which machines and GPUs; and have a job of each connect back.",
        ),
    ] = False,
    probe: Annotated[bool, typer.Option(help="With --live: submit those jobs, of up to a minute.")] = True,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong in a site file, and say what to write.

    With --live the batch systems are asked what they have for each tier now, and one job of each tier is submitted,
    which connects to this machine as a worker would, says what it finds there, and ends; of a tier of several workers
    there are two, which also try to reach each other. Call it where you start runs.
    Exits with 1 if there is something wrong, or if no worker of some tier would come.

    \b
    ctxflow site check my-site.toml           the file by itself
    ctxflow site check my-site.toml --live    and what the batch systems say
    """
    check = _Check(file)
    _check_file(check, live)
    if live and check.site and check.site.tiers:
        _ask(check, check.site, probe)
    check.problems, check.advice = list(dict.fromkeys(check.problems)), list(dict.fromkeys(check.advice))
    if as_json:
        _print_json(check)
    else:
        _print(check)
    if check.problems:
        raise typer.Exit(1)


@dataclasses.dataclass
class _Check:
    """A site file, and what was found out about it."""

    file: str
    site: Site | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)
    environment: EnvironmentAnswer | None = None
    tiers: list[TierAnswer] = dataclasses.field(default_factory=list)
    probes: list[ProbeAnswer] = dataclasses.field(default_factory=list)


def _check_file(check: _Check, live: bool) -> None:
    """Check the file by itself, and how workers would reach this machine."""
    from ctxflow.factory.site_check import network_advice, network_problems
    from ctxflow.sites import SiteError, load_site
    from ctxflow.sites.site_rules import hints

    try:
        check.site = found = load_site(check.file)
        check.problems += _policy_problems(found)
    except SiteError as error:
        if error.missing:
            raise
        check.problems += error.lines
        return
    others_read = False
    with contextlib.suppress(OSError):  # It is none, but a site of ours by its name.
        others_read = bool(os.stat(check.file).st_mode & 0o044)
    check.advice += hints(found, not live, others_read)
    if found.tiers:
        check.problems += network_problems(found)
        check.advice += network_advice(found)


def _policy_problems(found: Site) -> Iterator[str]:
    """Yield what is wrong with the policies' options, which only the policies know."""
    from ctxflow.policies.registry import FAMILIES, make

    for family in FAMILIES:
        try:
            make(family, getattr(found, family))
        except (ValueError, TypeError, ImportError) as error:
            yield f"{family}: {error}"


def _ask(check: _Check, found: Site, probe: bool) -> None:
    """Ask the batch systems, and have a job of each tier connect back where nothing is wrong so far."""

    from ctxflow.factory.site_check import ask_environment, probe_tiers
    from ctxflow.factory.tier_providers import ask_tiers

    with visible_console(stderr=True).status("Looking for the environment") as status:
        check.environment = environment = ask_environment(found)
        names = [f"{tier.name} ({tier.provider})" for tier in found.tiers]
        status.update(f"Asking for tier {names[0]}")
        for answer in ask_tiers(found):
            check.tiers.append(answer)
            if len(check.tiers) < len(names):
                status.update(f"Asking for tier {names[len(check.tiers)]}, {len(check.tiers) + 1} of {len(names)}")
    able = [answer.tier for answer in check.tiers if not answer.problems and answer.tier.workers]
    if probe and not check.problems and not environment.problems:
        with visible_console(stderr=True).status("Having a job of each tier connect back"):
            check.probes = probe_tiers(found, able)
    said: list[tuple[str, EnvironmentAnswer | TierAnswer | ProbeAnswer]] = [("", environment)]
    said += [(f"tier {answer.tier.name}: ", answer) for answer in check.tiers]
    said += [(f"tier {probed.tier}: ", probed) for probed in check.probes]
    for begin, each in said:
        check.problems += [begin + text for text in each.problems]
        check.advice += [begin + text for text in each.advice]


def _print_json(check: _Check) -> None:
    data: dict[str, Any] = {"file": check.file, "problems": check.problems, "advice": check.advice}
    if check.environment:
        data["environment"] = check.environment.found
        data["tiers"] = {
            answer.tier.name: {"provider": answer.tier.provider}
            | ({**dataclasses.asdict(answer.survey), "advice": answer.advice} if answer.survey else {})
            | {"problems": answer.problems}
            for answer in check.tiers
        }
        data["probes"] = {answer.tier: answer.found for answer in check.probes}
    print(json.dumps(data, indent=2))


def _print(check: _Check) -> None:
    console = visible_console(highlight=False, soft_wrap=True)
    if check.environment:
        lines = "\n".join(map(_line, check.tiers))
        console.print(_table(check.tiers) if console.is_terminal else lines, markup=False)
        console.print(f"Environment: {check.environment.found}", markup=False)
    for answer in check.probes:
        if answer.found:
            console.print(f"tier {answer.tier}: {answer.found}", markup=False)
    for sentence in check.problems:
        console.print(f"[red]wrong[/]  {escape(sentence)}")
    for sentence in check.advice:
        console.print(f"[yellow]think[/]  {escape(sentence)}")
    if (found := check.site) and not check.problems:
        counts = {"tier": len(found.tiers), "region": len(found.regions)}
        told = "".join(f", {count} {what}{'s' * (count != 1)}" for what, count in counts.items() if count)
        console.print(f"[green]fine[/]   {escape(check.file)}: site {escape(found.name)}, engine {found.engine}{told}")


def _table(tiers: list[TierAnswer]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tier", "provider", "machines", "free", "workers at most", "GPUs", "may submit"):
        table.add_column(name, justify="right" if name in ("machines", "free", "workers at most") else "left")
    for answer in tiers:
        survey = answer.survey
        cells = ["?"] * 5
        if survey:
            numbers = [_number(each) for each in (survey.machines, survey.free, survey.workers)]
            cells = [*numbers, _models(answer, "\n"), "yes" if survey.may_submit else "no"]
        table.add_row(answer.tier.name, answer.tier.provider, *map(escape, cells))
    return table


def _line(answer: TierAnswer) -> str:
    survey = answer.survey
    begin = f"tier {answer.tier.name} ({answer.tier.provider}): "
    if survey is None:
        return begin + "no answer"
    parts = [
        f"{_counted(survey.machines, 'machine')}, {_number(survey.free)} free",
        f"{_counted(survey.workers, 'worker')} at most",
        f"GPUs: {_models(answer, ', ') or 'none'}",
        f"may submit: {'yes' if survey.may_submit else 'no'}",
    ]
    return begin + "; ".join(parts)


def _counted(found: int | None, noun: str) -> str:
    return f"? {noun}s" if found is None else counted(found, noun)


def _number(found: int | None) -> str:
    return "?" if found is None else str(found)


def _models(answer: TierAnswer, between: str) -> str:
    models = answer.survey.gpu_models if answer.survey else {}
    ordered = sorted(models.items(), key=lambda pair: (-pair[1], pair[0]))
    return between.join(f"{count} {model}" for model, count in ordered)


@site.command()
def show(
    file: _File,
    as_json: AsJson = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print a site file, whatever the output is.")] = False,
) -> None:
    """Print all that a site is, defaults included and marked as such, as a site file."""
    from ctxflow.sites import load_site
    from ctxflow.sites.reference import as_data, toml_lines

    found = load_site(file)
    if as_json:
        print(json.dumps(as_data(found), indent=2))
        return
    console = visible_console(highlight=False, soft_wrap=True)
    plain = as_toml or not console.is_terminal
    for line, entry in toml_lines(found):
        if plain:
            print(line)
        else:
            console.print(line, markup=False, style="dim" if entry and not entry.given else "bold" if not entry else "")
