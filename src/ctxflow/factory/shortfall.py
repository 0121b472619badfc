"""Why a tier has fewer workers than are wanted, as a sentence for those who wait. Pure.

What does not live here: how that is found out (acquirer.py), and who shows it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.factory.provider import Survey
from ctxflow.wording import counted


def shortfall(counts: Mapping[str, int], wanted: int, told: str, held: str = "") -> str:
    """The reason, "" where there are as many as are wanted.

    :param counts: how many jobs are in which state, as a tier's jobs count them.
    :param told: what went wrong last, or what the batch system has, "" if neither is known.
    :param held: why somebody put jobs on hold.

    >>> shortfall({"joined": 2}, 2, "the schedd does not answer"), shortfall({"queued": 2}, 2, "")
    ('', '2 jobs wait for machines')
    >>> shortfall({"held": 1, "queued": 1}, 2, "", "via condor_hold (by user root)")
    '1 job is put on hold until it is released: via condor_hold (by user root); 1 job waits for a machine'
    """
    if counts.get("joined", 0) >= wanted:
        return ""
    parts = []
    if many := counts.get("held", 0):
        on_hold = "is put on hold until it is" if many == 1 else "are put on hold until they are"
        parts.append(f"{counted(many, 'job')} {on_hold} released" + (f": {held}" if held else ""))
    if told:
        parts.append(told)
    elif many := counts.get("queued", 0):
        parts.append(f"{counted(many, 'job')} " + ("waits for a machine" if many == 1 else "wait for machines"))
    if many := counts.get("evicted", 0):
        again = "was evicted, and waits" if many == 1 else "were evicted, and wait"
        parts.append(f"{counted(many, 'job')} {again} to run again")
    if many := counts.get("running", 0):
        parts.append(f"{counted(many, 'worker')} {'starts' if many == 1 else 'start'}")
    return "; ".join(parts)


def survey_reason(survey: Survey) -> str:
    """What a batch system has, as a reason to wait; "" if that says nothing.

    >>> survey_reason(Survey(machines=4, free=0)), survey_reason(Survey(machines=1, free=1))
    ('all 4 machines that would do are busy', '1 machine would do, and 1 of them is free: its jobs are to start soon')
    """
    if not survey.may_submit:
        return f"no more jobs are taken: {'; '.join(survey.advice)}"
    if survey.machines is None:
        return ""
    if survey.machines == 0:
        return f"no machine will do: {'; '.join(survey.advice) or 'change the requirements of the tier'}"
    if survey.free == 0:
        return (
            "the one machine that would do is busy"
            if survey.machines == 1
            else (f"all {survey.machines:,} machines that would do are busy")
        )
    free = f"{survey.free:,} of them {'is' if survey.free == 1 else 'are'} free"
    return f"{counted(survey.machines, 'machine')} would do, and {free}: its jobs are to start soon"
