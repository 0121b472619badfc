"""Routing policies as strangers write them: one that plays, and some that do what they should not."""

import os
import signal
import time

from ctxflow.policies.simple import ContextAffinity


class Nearest(ContextAffinity):
    """One that plays; `wait`: an option."""

    def __init__(self, wait=0.0):
        super().__init__()
        self.wait = wait


class Printing(Nearest):
    def __init__(self):
        super().__init__()
        print("to standard output")


class Raising(Nearest):
    def assign(self, view, ready):
        if view.now > 60:
            raise RuntimeError("no idea\nwhere to")
        return super().assign(view, ready)


class Dying(Nearest):
    def assign(self, view, ready):
        os.kill(os.getpid(), signal.SIGSEGV)


class Leaving(Nearest):
    def assign(self, view, ready):
        os._exit(7)


class Spinning(Nearest):
    def assign(self, view, ready):
        while True:
            pass


class Sleeping(Nearest):
    def assign(self, view, ready):
        time.sleep(3600)


class Idle(Nearest):
    """Gives nothing to anybody."""

    def assign(self, view, ready):
        return ()


class Noting(Nearest):
    """Notes each game in a file."""

    def __init__(self):
        super().__init__()
        with open(os.environ["NOTES"], "a") as file:
            file.write("game\n")


NOT_A_POLICY = 3
