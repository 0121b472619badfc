"""The health policy `sequential`: units that fail, or are slow, more often than their peers explain, by evidence.

A unit is a host, or a worker of it with its GPUs. It is named when the evidence of a sequential test passes what a
false alarm of the wanted probability takes, and still does two seconds later, by what its peers had meanwhile: so an
outage that hits all incriminates nobody, and neither do items that fail wherever they are. The test itself, and what
is counted, are in trials.py; docs/health.md explains both.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ctxflow.errors import counted
from ctxflow.option_values import number
from ctxflow.policies.protocols import Trial, Verdict, View
from ctxflow.policies.trials import EPOCH, SHARES, Cusum, Field, Unit, null_share
from ctxflow.policies.views import AppView, AttemptView, WorkerView
from ctxflow.renamed import names_of

WAIT = 2.0  # Seconds after which evidence is looked at again, by what the peers had meanwhile.
LOOK = 0.5  # Seconds between two looks at all.
BUILDS = 4.0  # The evidence that builds and jobs take: three that fail while others succeed, for each is dear.
JOBS = 3  # Jobs that fail, at least, before none is asked for there.
DOUBT = math.log(100)
LIKELY = 2  # For how many failures running one stands that looks like the machine's.
SHORTEST = 0.1  # Seconds below which a batch says nothing of a host's speed.
MOST = 20_000  # Attempts whose fault is not known yet, of whom what was then is kept.
SIBLINGS = 10.0  # Seconds for which the other workers of a host are waited for, to tell one of them from all.
ENOUGH = 3  # Calls that they have answered meanwhile.
LIFE = 30.0  # Seconds of a worker that are one trial of whether it crashes.
ALONE = 180.0  # Seconds for which what fails on the only host of its kind, which has answered nothing, is held back.
OVERDUE = 2  # How often one running batch counts as slow: when it is late, and when it is twice as late.

MOSTLY = 3  # Batches, half of all at least, from which on little evidence is enough to tell of a host unlike others.
UNLIKE = 2.0  # How many times slower than others with other GPU models a host may be besides.

BUILDING = ("staging", "loading")  # States of a context.
ALL = "*"  # In the place of a GPU model: workers of all models.

Key = tuple[str, str, str, str | None]


class SequentialTest:
    """Hosts, workers and GPUs in quarantine when a sequential test of what they do says that they are bad.

    :param false_alarm: the probability with which a good one may be named, roughly, for each time that it failed.
    :param slow: how many times the seconds of an item that its peers' median takes are slow.
    :param probation: seconds in quarantine before it is tried again; twice as long each time.
    :raises ValueError: for a number that makes no sense.
    """

    def __init__(self, false_alarm: float = 1e-6, slow: float = 2.0, probation: float = 600.0) -> None:
        number("false_alarm", false_alarm, "a probability between 0 and 1")
        number("slow", slow, "how many times slower than others, more than 1")
        number("probation", probation, "seconds, 0 or more")
        if not 0 < false_alarm < 1:
            raise ValueError("false_alarm is a probability: give a number between 0 and 1, such as 1e-6")
        if slow <= 1:
            raise ValueError("slow is how many times slower than others a bad host is: give more than 1")
        self.probation = probation
        self._slow = slow
        self._enough = math.log(len(SHARES) / false_alarm)
        self._fields: dict[Key, Field] = {}
        self._kin: dict[tuple[str, str, str], list[Field]] = {}  # Those of a kind, a subject and a tier.
        self._units: dict[str, tuple[Unit, Unit]] = {}
        # Worker, kind and subject of a trial -> where it is counted.
        self._known: dict[tuple[str, str, str], tuple[Key, Field, tuple[Unit, Unit]]] = {}
        self._suspect: dict[Key, Field] = {}  # Those with evidence against somebody.
        self._due: dict[tuple[Key, Unit], float] = {}  # When evidence that was enough is to be looked at again.
        # Attempt that failed -> the null share then, and when that was, until its fault is known.
        self._climates: dict[int, tuple[float, float]] = {}
        self._named_at: dict[str, float] = {}
        self._models: dict[tuple[str, str | None], str | None] = {}  # Tier and model -> the peers', as it was last.
        self._mixed: set[str] = set()  # Tiers that have hosts with a GPU model that no other host of theirs has.
        self._late: dict[int, int] = {}
        self._looks: dict[int, list[int]] = {}  # Attempts, by the tick from which on each is looked at again, in LOOKs.
        self._looked = 0  # The last such tick.
        self._last_attempt = 0  # Of those that are known there.
        self._named: dict[str, set[str]] = {}
        self._told: dict[tuple[str, str], float] = {}  # Slow host and worker -> when to report it again.
        self._next = self._forget_at = 0.0
        self._lives: list[tuple[float, str]] = []  # A heap of workers, by when each may have lived for another LIFE.
        self._living: set[str] = set()  # These.
        self._looked_at = -math.inf

    # --- what happens

    def observe(self, view: View, trial: Trial) -> None:
        """Count a trial, and note where the evidence is enough to look at it again."""
        worker = trial.worker
        known = self._known.get((worker.id, trial.kind, trial.subject))
        if known is None:
            kind = "call" if trial.kind == "miss" else trial.kind
            model = self._models[worker.tier, worker.gpu_model] = self._model(view, worker.tier, worker.gpu_model)
            key = (kind, trial.subject, worker.tier, model)
            known = key, self._field(key, trial.name, view.now), self._units_of(worker)
            self._known[worker.id, trial.kind, trial.subject] = known
        key, field, units = known
        if view.now < field.began + EPOCH:
            field.touched = view.now
        else:
            field.roll(view.now)
        if self._mixed and worker.tier in self._mixed and key[3] != ALL:
            everybody = self._field((*key[:3], ALL), trial.name, view.now)
            (everybody.misses if trial.kind == "miss" else everybody.counts).add(units, not trial.passed)
        if trial.kind == "miss":
            self._missed(view, trial, field, units)
            return
        if trial.passed and field.running:
            field.running.pop(units[1], None)
            field.failing.pop(worker.host, None)
        climate = 0.0
        if not trial.passed and trial.attempt:
            climate, when = self._climates.pop(trial.attempt, (1.0, view.now))
            if when <= self._named_at.get(worker.host, -1.0):  # It has served for that.
                return
        if trial.passed and not field.tests:  # As nearly always: without a call.
            field.counts.now[units[0]][0] += 1
            field.counts.now[units[1]][0] += 1
        elif field.add(units, trial.passed, view.now, trial.message, climate):
            self._suspect[key] = field
        if trial.item_seconds is not None:
            key = (*key[:3], worker.gpu_model)  # Other GPUs are no measure of how fast one is.
            self._timed(view, key, self._field(key, trial.name, view.now), trial, trial.item_seconds)

    def tried_job(self, view: View, tier: str, machine: str, passed: bool, message: str = "") -> None:
        """Count a job whose worker has joined, or that ended before that."""
        key = ("job", tier, tier, ALL)
        if passed and key not in self._fields:  # Nothing failed.
            return
        field = self._field(key, f"tier {tier}", view.now)
        if not passed:
            field.failing[machine] = view.now
        if field.add(((machine, ""),), passed, view.now, message):
            self._suspect[key] = field

    def _missed(self, view: View, trial: Trial, field: Field, units: tuple[Unit, Unit]) -> None:
        """Note a failed attempt, whoever's fault it was, and what its worker's peers had done then."""
        if trial.attempt:
            tried, failed, most = self._others_tried(view, field, trial.worker)
            self._climates[trial.attempt] = null_share(failed, tried) if most else 0.0, view.now
            if len(self._climates) > MOST:
                del self._climates[next(iter(self._climates))]
        field.misses.add(units, True)
        field.running[units[1]] = field.running.get(units[1], 0) + (LIKELY if trial.machine else 1)
        field.failing.setdefault(trial.worker.host, view.now)

    def _model(self, view: View, tier: str, model: str | None) -> str | None:
        """Return the GPU model of a worker's peers: `ALL` where no other host of its tier has its model."""
        if view.hosts(tier, model) > 1 or view.hosts(tier) < 2:
            return model
        self._mixed.add(tier)
        return ALL

    def _crowd(self, view: View, worker: WorkerView) -> int:
        """Return how many hosts a worker's peers are on, with its own."""
        return view.hosts(worker.tier, self._model(view, worker.tier, worker.gpu_model))

    def _timed(self, view: View, key: Key, field: Field, trial: Trial, seconds: float) -> None:
        field.learn(trial.worker.host, seconds)
        usual = self._slowest(field, trial.worker.host)
        if usual is not None and trial.attempt not in self._late:  # It was counted while it ran.
            self._add_slow(view, key, field, trial.worker, seconds <= usual)

    def _slowest(self, field: Field, host: str) -> float | None:
        """Return the most seconds of an item that are not slow on a host: by those with its GPU model, else by all.

        GPU models differ, so that the others are a measure only for what is far slower.
        """
        median = field.median(host)
        if median is not None:
            return self._slow * median
        others = field.kin_median(host)
        return UNLIKE * self._slow * others if others is not None else None

    def _add_slow(self, view: View, key: Key, field: Field, worker: WorkerView, passed: bool) -> None:
        key = ("slow", *key[1:])
        slow = self._field(key, field.name, view.now)
        if slow.add(self._units_of(worker), passed, view.now):
            self._suspect[key] = slow

    def _threshold(self, key: Key, host: str) -> float:
        """Return the evidence that it takes, which is less where the host would only be told, and is mostly slow."""
        little = key[0] in ("build", "job")
        if key[0] == "slow" and self._is_unlike(key, host):
            trials, failed, _ = self._fields[key].tried_on(host)
            little = failed >= MOSTLY and 2 * failed >= trials
        return min(BUILDS, self._enough) if little else self._enough

    def _is_unlike(self, key: Key, host: str) -> bool:
        """Return whether no other host has shown how fast a host's GPU model is."""
        call = self._fields.get(("call", *key[1:]))
        return call is not None and call.median(host) is None

    def _field(self, key: Key, name: str, now: float) -> Field:
        field = self._fields.get(key)
        if field is None:
            field = self._fields[key] = Field(key[0], key[1], name, now)
            if key[3] != ALL:
                alike = self._kin.setdefault(key[:3], [])
                alike.append(field)
                field.kin = alike
        field.roll(now)
        return field

    def _units_of(self, worker: WorkerView) -> tuple[Unit, Unit]:
        units = self._units.get(worker.id)
        if units is None:
            part = ",".join(worker.devices) or worker.id
            units = self._units[worker.id] = ((worker.host, ""), (worker.host, part))
        return units

    # --- doubts

    def doubts(self, view: View, worker: WorkerView, app: AppView) -> bool:
        """Return whether it failed in a row while others answer; once is enough where it never answered yet.

        Also while no other host of its kind is there yet to tell its fault from the items', but not for ever.
        """
        field = self._fields.get(("call", app.id, worker.tier, self._model(view, worker.tier, worker.gpu_model)))
        if field is None or not field.running:
            return False
        host, unit = self._units_of(worker)
        running = field.running.get(unit, 0)
        if not running:
            return False
        attempts, failures = field.tried(unit)
        others = self._crowd(view, worker) - 1
        if not others and not self._is_awaited(view, worker, app, field):
            return False
        if attempts == failures:  # It has answered nothing lately; nor have others yet, where calls take their time.
            return not others or 2 * field.peers(view.now, attempts=True).failing(worker.host) < others
        test = field.tests.get(host)
        if test is not None and max(test.sums) >= self._enough / 2:
            return True
        tried, failed, _ = self._others_tried(view, field, worker)
        return running * math.log(max(1.0, 0.6 / null_share(failed, tried))) > DOUBT

    def _is_awaited(self, view: View, worker: WorkerView, app: AppView, field: Field) -> bool:
        """Return whether another host may still tell a worker's fault from that of what failed there.

        One of another tier that answers it does so for ever; one that has not tried it yet, or that is only asked for,
        for some minutes from the first failure on.
        """
        others = [tier.name for name, tier in view.tiers.items() if name != worker.tier and view.permits(app, tier)]
        peers = [each.peers(view.now, True) for name in others for each in self._kin.get(("call", app.id, name), ())]
        failing = sum(each.failing("") for each in peers)
        if 2 * failing < sum(each.others("") for each in peers):
            return True
        there = sum(view.hosts(name) for name in others)
        if there and 2 * failing >= there:
            return False
        lacking = any(tier.connected < (tier.requested or 0) for tier in view.tiers.values())
        return (there > 0 or lacking) and view.now < field.failing.get(worker.host, view.now) + ALONE

    def _others_tried(self, view: View, field: Field, worker: WorkerView) -> tuple[int, int, bool]:
        """Return the attempts of a worker's peers, those that failed, and whether most peers have ended one yet."""
        peers = field.peers(view.now, attempts=True)
        others = self._crowd(view, worker) - 1
        return *peers.of(worker.host), 2 * peers.others(worker.host) > others

    # --- judgement

    def judge(self, view: View) -> Sequence[Verdict]:
        """Look at who is late, and again at those of whom there was evidence enough."""
        if view.now < self._next:
            return ()
        self._next = view.now + LOOK
        models = {pair: self._model(view, *pair) for pair in self._models}
        if models != self._models:  # Who is whose peer is another now.
            self._models = models
            self._known.clear()
        self._look_at_running(view)
        self._look_at_building(view)
        self._look_at_joined(view)
        self._look_at_living(view)
        self._forget(view)
        return list(self._verdicts(view))

    def _look_at_running(self, view: View) -> None:
        """Count a slow trial for each batch that is late, and another when it is twice as late.

        Each is looked at when it would be late by what its peers had shown when it was looked at last, or once it is
        twice as old if that is sooner, since they may have shown to be faster.
        """
        new = list(itertools.takewhile(self._is_new, reversed(cast("dict[int, AttemptView]", view.attempts))))
        self._last_attempt = new[0] if new else self._last_attempt
        due, before, self._looked = new, self._looked, int(view.now / LOOK)
        passed = range(before + 1, self._looked + 1)
        for tick in passed if len(passed) < len(self._looks) else [known for known in self._looks if known in passed]:
            due += self._looks.pop(tick, ())
        for each in sorted(due):
            attempt = view.attempts.get(each)
            again = self._look_at(view, attempt) if attempt is not None and attempt.items else math.inf
            if again < math.inf:
                self._looks.setdefault(max(self._looked + 1, math.ceil(again / LOOK)), []).append(each)
            else:
                self._late.pop(each, None)

    def _is_new(self, attempt: int) -> bool:
        return attempt > self._last_attempt

    def _look_at(self, view: View, attempt: AttemptView) -> float:
        """Count a batch that is late; return when it is to be looked at again."""
        worker, app = view.workers.get(attempt.worker), view.apps.get(attempt.app)
        if worker is None or app is None:
            return math.inf
        age = view.now - attempt.started
        soon = view.now + max(LOOK, age)
        key = ("call", attempt.app, worker.tier, worker.gpu_model)
        field = self._fields.get(key)
        if field is None:
            alike = self._kin.get(key[:3])
            if not alike:
                return soon
            field = self._field(key, alike[0].name, view.now)
        slowest = self._slowest(field, worker.host)
        if slowest is None:
            return soon
        usual, call = slowest / self._slow * len(attempt.items) * _beside(worker, app), app.call_seconds or 0.0
        due = self._slow * (usual + (call if call < usual / 2 else 0.0)) + SHORTEST
        level, before = min(OVERDUE, int(age / due)), self._late.get(attempt.id, 0)
        if level > 1 and self._is_unlike(key, worker.host):  # Rows may differ as much as hosts do.
            level = 1
        if level > before:
            self._late[attempt.id] = level
            for _ in range(level - before):
                self._add_slow(view, key, field, worker, False)
        return soon if level >= OVERDUE else min(soon, attempt.started + (level + 1) * due)

    def _look_at_building(self, view: View) -> None:
        for (kind, subject, tier, model), field in self._suspect.items():
            if kind == "build":
                ended = field.counts.hosts()
                alike = [w for w in view.holding(subject) if w.tier == tier and model in (ALL, w.gpu_model)]
                building = [w.host for w in alike if (held := w.contexts.get(subject)) and held.state in BUILDING]
                field.awaited = len({host for host in building if host not in ended})

    def _look_at_joined(self, view: View) -> None:
        """Where jobs fail, count the hosts of workers that are connected elsewhere: they may have joined long ago."""
        for (kind, _, tier, _), field in self._suspect.items():
            if kind == "job":
                known = field.counts.hosts()
                for other in [w.machine for w in view.workers.values() if w.tier == tier and w.machine not in known]:
                    field.counts.add(((other, ""),), False)

    def _look_at_living(self, view: View) -> None:
        """Count a passed trial for workers that lived on and have a context: those that crash fail one."""
        while self._lives and self._lives[0][0] <= view.now:
            due, name = heapq.heappop(self._lives)
            worker = view.workers.get(name)
            if worker is None:
                self._living.discard(name)
                continue
            since = min((held.since for held in worker.contexts.values()), default=view.now)
            if due < since + LIFE:
                due = since
            elif worker.noticed is None and not worker.draining:
                self.observe(view, Trial(worker, "crash", "", "", passed=True))
            heapq.heappush(self._lives, (due + LIFE, name))
        for name in reversed(cast("dict[str, WorkerView]", view.workers)):
            if view.workers[name].joined < self._looked_at:
                break
            if name not in self._living:
                self._living.add(name)
                heapq.heappush(self._lives, (view.now + LIFE, name))
        self._looked_at = view.now

    def _verdicts(self, view: View) -> Iterator[Verdict]:
        for key, field in list(self._suspect.items()):
            if not field.tests:
                del self._suspect[key]
            for unit, test in list(field.tests.items()):
                evidence = field.evidence(unit, view.now) if field.tests.get(unit) is test else None
                if evidence is None or evidence < BUILDS or evidence < self._threshold(key, unit[0]):
                    self._due.pop((key, unit), None)
                    continue
                due = self._due.setdefault((key, unit), view.now + WAIT)
                if view.now < due:
                    continue
                verdict = self._narrowed(view, key, unit, due)
                if verdict is None:
                    continue
                why = self._why_it_stays(view, key, verdict) if field.kind == "slow" else ""
                if not why:
                    self._note(verdict)
                    self._named_at[verdict.host] = view.now
                    yield verdict
                elif all(view.now >= self._told.get((verdict.host, w), -math.inf) for w in ("", verdict.worker)):
                    self._told[verdict.host, verdict.worker] = view.now + self.probation
                    yield dataclasses.replace(verdict, cause=f"{verdict.cause}; {why}", told=True)

    def _why_it_stays(self, view: View, key: Key, verdict: Verdict) -> str:
        """Return why who is slow keeps its work, "" if it does not."""
        if self._is_unlike(key, verdict.host):
            return "no other host has its GPU model, so that it may be slow by nature"
        gained = gains(view, key[1], verdict.host, verdict.worker)
        return "" if gained else "the run would end no earlier without it"

    def _narrowed(self, view: View, key: Key, unit: Unit, due: float) -> Verdict | None:
        """Return the narrowest unit that explains it: one worker whose siblings pass, else the host; None if gone."""
        field, (host, part) = self._fields[key], unit
        if field.kind == "job":
            if field.tests[unit].failed < JOBS or self._is_outage(view, field):
                return None
            cause = self._cause(view, field, unit, field.tests[unit], False)
            return Verdict(host, cause, jobs=True, tier=field.subject)
        there = [worker for worker in view.workers.values() if worker.host == host]
        if not there:  # Nobody could be named: all that were there crashed.
            return None
        test, null = field.tests[unit], field.null(unit, view.now) or 0.0
        trials, failed, failing = field.tried_on(host)
        if not part and len(failing) == 1:
            part = next(iter(failing))
        own = field.tests.get((host, part), test)
        if part:
            others = trials - test.before[0] - own.failed - own.passed
            others_failed = failed - test.before[1] - own.failed
            alike = [worker for worker in there if key[3] in (ALL, worker.gpu_model)]
            if len(there) < 2 or others_failed > max(null, 0.25) * others or self._named.get(host, set()) - {part}:
                part = ""
            elif len(alike) > 1 and others - others_failed < ENOUGH and view.now < due + SIBLINGS:
                return None  # Are they better? They may not have ended yet what they began before.
        names = (worker.id for worker in view.workers.values() if self._units_of(worker)[1] == (host, part))
        named = next(names, None) if part else ""
        return None if named is None else Verdict(host, self._cause(view, field, unit, test, bool(named)), named)

    @staticmethod
    def _is_outage(view: View, field: Field) -> bool:
        """Return whether jobs fail on more hosts than those on which workers join meanwhile."""
        since = view.now - EPOCH
        failing = {machine for machine, when in field.failing.items() if when > since}
        if len(failing) < 2:
            return False
        there = (w for w in view.workers.values() if w.tier == field.subject and w.joined > since)
        return len({worker.machine for worker in there} - failing) < len(failing)

    def _cause(self, view: View, field: Field, unit: Unit, test: Cusum, narrow: bool) -> str:
        kin = field.kin if not unit[1] else [field]
        tests = [each.tests[unit] for each in kin if unit in each.tests] or [test]
        here_failed, tried = sum(each.failed for each in tests), sum(each.failed + each.passed for each in tests)
        peers = [each.peers(view.now).of(unit[0]) for each in field.kin]
        trials, failed = sum(each for each, _ in peers), sum(each for _, each in peers)
        others = "others" if not narrow else "others, also on its host"
        if field.kind == "slow":
            calls = [each for each in self._fields.values() if each.subject == field.subject and unit[0] in each.paces]
            call = calls[0] if calls else field
            pace, median = call.paces.get(unit[0]), call.median(unit[0]) or call.kin_median(unit[0])
            told = f" (an item takes {pace:.3g} s there, {median:.3g} s elsewhere)" if pace and median else ""
            return f"{field.name} is slow there: {here_failed} of {counted(tried, 'batch', 'batches')}{told}"
        message = field.messages.get(unit, "")
        told = f": {message}" if message else ""
        if field.kind == "crash":
            return f"{counted(here_failed, 'worker')} crashed there alone, and {failed} elsewhere{told}"
        if field.kind == "job":
            what = f"{here_failed} of {counted(tried, 'job')} ended there before a worker joined"
            return f"{what}, and {failed} of {trials} elsewhere{told}"
        what = "builds of {} failed" if field.kind == "build" else "calls of {} failed there alone"
        return f"{here_failed} of {tried} {what.format(field.name)}, and {failed} of {trials} of {others}{told}"

    def _note(self, verdict: Verdict) -> None:
        """Have what is named start again, when it is tried again, with half the evidence that it takes."""
        if verdict.worker:
            self._named.setdefault(verdict.host, set()).add(self._units[verdict.worker][1][1])
        else:
            self._named.pop(verdict.host, None)
        for key, field in self._fields.items():
            for unit, test in field.tests.items():
                if unit[0] == verdict.host:
                    half = self._threshold(key, verdict.host) / 2
                    field.tests[unit] = Cusum(min(max(test.sums), half))
        self._due = {pair: due for pair, due in self._due.items() if pair[1][0] != verdict.host}

    def _forget(self, view: View) -> None:
        """Forget who is gone, and what nobody does any more."""
        if view.now < self._forget_at:
            return
        self._forget_at = view.now + EPOCH
        self._known.clear()
        self._units = {name: units for name, units in self._units.items() if name in view.workers}
        there = {unit for units in self._units.values() for unit in units}
        hosts = {host for host, _ in there}
        for key, field in list(self._fields.items()):
            if field.touched < view.now - (20 if field.tests else 2) * EPOCH:
                del self._fields[key]
                self._suspect.pop(key, None)
                if field in (alike := self._kin.get(key[:3], [])):
                    alike.remove(field)
                    if not alike:
                        del self._kin[key[:3]]
                continue
            field.running = {unit: count for unit, count in field.running.items() if unit in there}
            if field.kind == "job":  # Where no worker is.
                field.failing = {name: when for name, when in field.failing.items() if when > view.now - EPOCH}
            else:
                field.failing = {host: since for host, since in field.failing.items() if host in hosts}
            field.keep(hosts)
            for unit in [unit for unit in field.tests if unit[1] and unit not in there]:
                del field.tests[unit]
                field.messages.pop(unit, None)
        self._due = {pair: due for pair, due in self._due.items() if pair[0] in self._fields}
        self._told = {unit: again for unit, again in self._told.items() if again > view.now}
        self._named_at = {host: when for host, when in self._named_at.items() if when > view.now - 20 * EPOCH}


def _overlaps(app: AppView) -> bool:
    return app.overlaps or (app.concurrency or 1) > 1


def _beside(worker: WorkerView, app: AppView) -> float:
    """Return how many calls share the time of one: those in flight now, or as many as usual if that is more."""
    if not _overlaps(app):
        return 1.0
    return max(1.0, worker.calls_beside(app.id) or 1.0, worker.in_flight(app.context))


TOLERANCE = 1.05  # The share of the remaining time that certainty about its end is worth.


def gains(view: View, app_id: str, host: str, worker_id: str = "") -> bool:
    """Return whether what is left of an app is done as early without a host, or one worker of it, or nearly so.

    Without it the others do all. With it all are busy until the end, or until what its next batch takes there.
    """
    app = view.apps.get(app_id)
    if app is None:
        return True
    all_speed = slow_speed = next_batch = 0.0
    for worker in view.workers.values():
        seconds = worker.seconds_per_item(app_id)
        if seconds is None or seconds <= 0 or worker.draining or worker.noticed is not None:
            continue
        # What overlaps takes one slot together, and `seconds` are an item's share of that.
        speed = (1 if _overlaps(app) else worker.slots) / seconds
        all_speed += speed
        if worker.host == host and worker_id in ("", worker.id):
            slow_speed += speed
            next_batch = max(next_batch, seconds * max(1, view.batch_size(app, worker)))
    left = app.backlog + sum(len(each.items) for each in view.attempts.values() if each.app == app_id)
    if all_speed <= slow_speed:
        return False
    return left / (all_speed - slow_speed) <= TOLERANCE * max(left / all_speed, next_batch)


if not TYPE_CHECKING:
    __getattr__ = names_of(__name__)
