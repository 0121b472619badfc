"""What an event may cost: calls, of Python and of C, and lines of Python, as `test_costs.py` counts them.

Only a commit that says in its message why an event has to cost more may raise a number. One number holds for all sizes
of a pool: nothing that an event leads to may grow with the number of workers. A table by workers is of a policy of
which that is not true (yet): no other may get one.
"""

DEFAULT = {"busy": 1000, "idle": 1100}
FILES = 1600

POLICIES = {
    # Each decision goes through the free workers, once.
    ("idle", "routing.least-loaded"): {100: 1600, 1000: 2000},
    ("idle", "routing.round-robin"): {100: 1650, 1000: 2150},
    ("idle", "routing.sdib"): {100: 1900, 1000: 2700},
    ("idle", "routing.skylb"): {100: 1100, 1000: 1500},
    ("busy", "routing.least-loaded"): 1000,
    ("busy", "routing.round-robin"): 850,
    ("busy", "routing.sdib"): 1100,
    ("busy", "routing.skylb"): 1050,
    ("busy", "routing.torta"): 1500,
    ("idle", "routing.torta"): 1400,
    ("busy", "batching.coalescing"): 1000,
    ("busy", "batching.opportunistic"): {100: 1100, 400: 1100},  # Like one number: its batches are many.
    # A worker that is to build a context asks whether enough hold it already.
    ("busy", "placement.agh"): {100: 1500, 1000: 2450},
    ("busy", "scaling.activation"): 1900,
    ("busy", "scaling.queue-proportional"): 1150,
    # On ticks all workers are gone through, and the events of twenty sessions are as many whatever the pool.
    ("sessions", "scaling.closed-loop"): {100: 700, 1000: 1300},
    # Whenever a session needs a worker, all are gone through.
    ("sessions", "sessions.least-loaded"): {100: 650, 1000: 950},
    ("sessions", "sessions.turboserve"): {100: 1050, 1000: 2900},
    ("busy", "preemption.exact"): 1000,
    ("busy", "preemption.imp"): 1000,
    ("busy", "preemption.standard"): 1000,
    ("busy", "health.none"): 800,
}
