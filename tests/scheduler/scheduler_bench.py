"""A scheduler to be tested: fed with events, checked after each, with short names for what tests say often."""

from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


class Bench:
    """A scheduler with its clock; each event is followed by a check of all invariants."""

    def __init__(self, limits=None, start_when=0.0, **policies):
        defaults = {
            "routing": "context-affinity",
            "batching": {"policy": "fixed", "size": 4},
            "placement": "everywhere",
            "preemption": "none",
            "scaling": "fixed",
        }
        chosen = {family: make(family, choice) for family, choice in {**defaults, **policies}.items()}
        self.scheduler = Scheduler(Policies(**chosen), limits, start_when=start_when)
        self.now = 0.0
        self.next_item = 0

    @property
    def state(self):
        return self.scheduler.state

    @property
    def view(self):
        return self.scheduler.view

    def tell(self, kind, *values, **named):
        """Feed an event; gives the commands. A plan that is to be made is made at once."""
        commands = self.scheduler.handle(kind(self.now, *values, **named))
        self.scheduler.validate()
        if only(commands, cmd.MakePlan) and kind is not ev.PlanMade:
            commands += self.tell(ev.PlanMade)
        return commands

    def context(self, name, **options):
        self.tell(ev.ContextDeclared, ev.ContextSpec(name, name, **options))

    def app(self, name, context="", **options):
        if context not in self.state.contexts:
            self.context(context)
        self.tell(ev.AppDeclared, ev.AppSpec(name, name, context=context, **options))

    def submit(self, app, count):
        items = range(self.next_item, self.next_item + count)
        self.next_item = items.stop
        return self.tell(ev.ItemsSubmitted, app, items)

    def join(self, *names, **options):
        return [c for name in names for c in self.tell(ev.WorkerJoined, ev.WorkerSpec(name, **options))]

    def ready(self, worker, context="", **measured):
        return self.tell(ev.ContextReady, worker, context, seconds=1.0, **measured)

    def fail_context(self, worker, context="", kind="exception"):
        return self.tell(ev.ContextFailed, worker, context, ev.Failure(kind, "RuntimeError", f"no {context}"))

    def finish(self, run):
        return self.tell(ev.BatchFinished, run.worker, run.attempt, seconds=1.0)

    def some(self, run, first, count):
        """Results before the batch has ended."""
        return self.tell(ev.ItemsFinished, run.worker, run.attempt, first, count)

    def end(self, run):
        return self.tell(ev.BatchEnded, run.worker, run.attempt, seconds=1.0)

    def fail(self, run, kind="exception", lost_context=False, at=None, machine=False):
        failure = ev.Failure(kind, "ValueError", "bad item", worker=run.worker, machine=machine)
        return self.tell(ev.BatchFailed, run.worker, run.attempt, failure, lost_context=lost_context, at=at)

    def lose(self, worker, evicted=False):
        return self.tell(ev.WorkerLost, worker, evicted=evicted)

    def worker_with(self, context, name="w1", **options):
        """A worker that has built a context."""
        commands = self.join(name, **options)
        assert cmd.Load(name, context) in commands
        return self.ready(name, context)


def only(commands, kind):
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def run_of(commands):
    """The one batch that the commands start."""
    [run] = only(commands, cmd.Run)
    return run


def drive(bench, commands, bad, kind="exception", lost_context=False):
    """Answer every batch, failing those that hold a bad item; gives the dead in the order they died, and the done."""
    dead, done = [], []
    waiting = list(commands)
    while waiting:
        command = waiting.pop(0)
        if isinstance(command, cmd.Run):
            bad_batch = bad & set(command.items)
            waiting += bench.fail(command, kind, lost_context) if bad_batch else bench.finish(command)
        elif isinstance(command, cmd.Load):
            waiting += bench.ready(command.worker, command.context)
        elif isinstance(command, cmd.Bury):
            dead += command.items
        elif isinstance(command, cmd.Deliver):
            done += command.items
    return dead, done
