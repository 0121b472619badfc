"""What HTCondor complains of, as sentences that say what to do.

What does not live here: how many jobs its queue takes yet (condor_limits.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ctxflow.factory.condor_process import CondorError, NoAnswer
from ctxflow.factory.provider import ProviderError


@contextlib.contextmanager
def told(what: str, who: str = "schedd") -> Iterator[None]:
    """Make HTCondor's complaint one sentence of ours, a ProviderError.

    :param who: was asked.
    """
    try:
        yield
    except (CondorError, OSError) as error:
        complaint = " ".join(str(error).split()).rstrip(",.")
        if isinstance(error, NoAnswer):
            complaint = f"its {who} does not answer: see whether condor_q works on this machine ({complaint})"
        else:
            complaint = _why(complaint)
        raise ProviderError(f"{what}: {complaint}") from None


def _why(complaint: str) -> str:
    """HTCondor's complaint, and what to do about it.

    >>> _why("Unable to commit transaction")
    'its schedd cannot keep them: is the disk full that its SPOOL directory is on? (Unable to commit transaction)'
    >>> _why("Failed to create new cluster").partition(":")[0]
    'its schedd takes no jobs, or ended meanwhile'
    """
    if "commit transaction" in complaint:
        return f"its schedd cannot keep them: is the disk full that its SPOOL directory is on? ({complaint})"
    if "create new cluster" in complaint:
        return f"its schedd takes no jobs, or ended meanwhile: see whether condor_q works on this machine ({complaint})"
    if any(each in complaint for each in ("connect to schedd", "SECMAN", "locate local daemon")):
        return f"its schedd does not answer: see whether condor_q works on this machine ({complaint})"
    return f"{complaint}; see whether condor_q works on this machine"
