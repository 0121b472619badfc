"""Whether a site can ever give a context the GPUs that it asks for.

What does not live here: giving them (reservations.py).
"""

from __future__ import annotations

from collections.abc import Collection

from ctxflow.scheduler.events import ContextSpec, TierSpec
from ctxflow.wording import counted


def refused(spec: ContextSpec, tiers: Collection[TierSpec], reserves: bool) -> str | None:
    """Why a context can never have its GPUs, in a sentence that says what to do; None if it can.

    :param reserves: whether the preemption policy makes room on machines for workers with more GPUs than others have.

    >>> tiers = [TierSpec("a10", gpus=1, machine_gpus=8)]
    >>> refused(ContextSpec("c", "llama", gpus=4), tiers, reserves=True)
    >>> print(refused(ContextSpec("c", "llama", gpus=4), tiers, reserves=False))
    the context llama needs 4 GPUs, but a worker here has 1: set preemption = "exact" in the site
    """
    most = max((tier.gpus for tier in tiers), default=0)
    widest = max((tier.machine_gpus for tier in tiers), default=0)
    close = spec.affinity == "guaranteed" and spec.gpus >= 2
    if (reserves and spec.gpus <= widest) or (spec.gpus <= most and not close):
        return None
    need = f"needs {counted(spec.gpus, 'GPU')}, but a worker here has {most}"
    hint = "use a site whose workers have as many, or a recipe with fewer (gpus=0 for none)"
    if close and spec.gpus <= most:
        need = f"wants its {counted(spec.gpus, 'GPU')} close together, and nobody sees to that here"
        hint = 'use a site where workers can be asked for on GPUs of one\'s choice, or affinity="best-effort"'
    elif widest >= most and reserves and widest:
        need += f" and a machine {widest}"
    if not reserves and spec.gpus <= widest:
        hint = 'set preemption = "exact" in the site'
    return f"the context {spec.name} {need}: {hint}"
