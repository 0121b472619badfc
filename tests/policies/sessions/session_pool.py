"""A pool of workers that carry sessions, played by hand, for tests of which worker carries which."""

from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

BUILT = 100  # Bytes that the context takes when it has just been built.


class Pool:
    """A scheduler, some workers whose contexts are built at once, and steps that take 0.1 s a session.

    :ivar own: session -> the seconds that it adds to a step instead. :ivar sizes: session -> bytes of its state.
    :ivar paces: GPU model -> how many times as long steps take there.
    :ivar silent: sessions whose turn is over with each chunk.
    :ivar slow: workers that build a context until `built` says that they have.
    """

    def __init__(self, placement, workers=2, chunk_target=None, memory=None, models=()):
        self.scheduler = Scheduler(Policies.chosen({"sessions": placement}))
        self.now, self.steps, self.carries = 0.0, [], 0
        self.own, self.sizes, self.paces = {}, {}, {}
        self.slow, self.loading, self.silent = set(), {}, set()
        self.last = {}  # Worker -> seconds of its last step.
        self.tell(ev.ContextDeclared, ev.ContextSpec("model", "model", memory=memory))
        spec = ev.AppSpec("talk", "talk", "model", batch=False, sessions=True, chunk_target=chunk_target)
        self.tell(ev.AppDeclared, spec)
        self.models = dict(zip((f"w{number}" for number in range(workers)), models, strict=False))
        self.join(*(f"w{number}" for number in range(workers)))

    @property
    def sessions(self):
        return self.scheduler.state.sessions

    def join(self, *names):
        for name in names:
            self.tell(ev.WorkerJoined, ev.WorkerSpec(name, gpu_model=self.models.get(name)))

    def open(self, *numbers):
        for number in numbers:
            self.tell(ev.SessionOpened, number, "talk", 1_000_000)

    def tell(self, kind, *values, **named):
        for command in self.scheduler.handle(kind(self.now, *values, **named)):
            if isinstance(command, cmd.Load) and command.worker in self.slow:
                self.loading[command.worker] = command.context
            elif isinstance(command, cmd.Load):
                self.tell(ev.ContextReady, command.worker, command.context, 1.0, BUILT)
            elif isinstance(command, cmd.Carry):
                self.carries += 1
                self.tell(ev.StateArrived, command.worker, command.session, command.made)
            elif isinstance(command, cmd.Step):
                self.steps.append(command)
        self.scheduler.validate()

    def built(self, worker):
        """Have a slow worker have its context."""
        self.slow.discard(worker)
        self.tell(ev.ContextReady, worker, self.loading.pop(worker), 1.0, BUILT)

    def go(self, rounds=6):
        """Have all workers make so many steps."""
        for _ in range(rounds):
            self.now += 1.0
            steps, self.steps = self.steps, []
            for step in steps:
                outcomes = [
                    {
                        **({"made": 1} if order.chunk is not None else {}),
                        **({"idle": 1} if order.chunk is not None and order.session in self.silent else {}),
                        **({"frozen": ["", self.sizes.get(order.session, 5)]} if order.then == "freeze" else {}),
                        **({"kept": self.sizes.get(order.session, 5)} if order.then in ("keep", "leave") else {}),
                    }
                    for order in step.orders
                ]
                pairs = zip(step.orders, outcomes, strict=True)
                seconds = sum(self.own.get(order.session, 0.1) for order, outcome in pairs if "made" in outcome)
                seconds *= self.paces.get(self.models.get(step.worker), 1.0)
                if seconds:
                    self.last[step.worker] = seconds
                self.tell(ev.StepFinished, step.worker, step.attempt, seconds, outcomes)
            self.tell(ev.Tick)

    def bytes_on(self, worker):
        """The bytes of the states that a worker carries."""
        return sum(self.sizes.get(number, 5) for number in self.scheduler.state.workers[worker].sessions)

    def counts(self):
        return sorted(len(worker.sessions) for worker in self.scheduler.state.workers.values())
