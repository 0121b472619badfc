"""What libraries report of a worker to their makers: nothing, unless the user said so. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_EVERYBODY = "DO_NOT_TRACK"  # Many heed it; who turned one on would have it off by that.
_OFF = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRTLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_NO = ("", "0", "false", "no", "off")


def without_usage_statistics(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn usage statistics off, beside those that somebody has set.

    Nothing is turned off where `DO_NOT_TRACK` is 0, and what one library's own variable turns on stays on.

    >>> without_usage_statistics({"VLLM_NO_USAGE_STATS": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    {'HF_HUB_DISABLE_TELEMETRY': '1', 'TRTLLM_NO_USAGE_STATS': '1'}
    >>> without_usage_statistics({"DO_NOT_TRACK": "0"})
    {}
    """
    if environment.get(_EVERYBODY, "1").lower() in _NO:
        return {}
    off = {name: value for name, value in _OFF.items() if name not in environment}
    if not any((environment[name].lower() in _NO) == (value == "1") for name, value in _OFF.items() if name not in off):
        off[_EVERYBODY] = environment.get(_EVERYBODY, "1")
    return off
