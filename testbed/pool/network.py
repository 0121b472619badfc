"""The pool's network: a bridge in the switch's namespace, a veth pair to each host, shaped by tc's tbf.

Hosts of another region are on a second bridge, which a shaped veth pair connects to the first.
"""

from __future__ import annotations

import json
from typing import Any

from .machine import enter, run
from .settings import address, check_rate

BRIDGE, FAR_BRIDGE = "ctxflow-br0", "ctxflow-br1"
SPAN = "span0"
"""The near end of what connects the two bridges, as `links` names it."""


def _port(name: str) -> str:
    return f"ctxflow-{name}"


def _shape(device: str, mbit: float) -> list[str]:
    # A bucket of 2 ms of the link, and at least two of the largest segments that a veth pair hands over.
    burst = max(131072, int(mbit * 1e6 / 8 * 0.002))
    rate = f"{int(mbit * 1e6)}bit"
    return [
        "tc",
        "qdisc",
        "replace",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        str(burst),
        "latency",
        "50ms",
    ]


def span(switch: int, mbit: float) -> None:
    """Make the second bridge, and the link to it."""
    inside = enter(switch, "net")
    near, far = _port(SPAN), _port("span1")
    run([*inside, "ip", "link", "add", FAR_BRIDGE, "type", "bridge"])
    run([*inside, "ip", "link", "set", FAR_BRIDGE, "up"])
    run([*inside, "ip", "link", "add", near, "type", "veth", "peer", "name", far])
    for device, bridge in ((near, BRIDGE), (far, FAR_BRIDGE)):
        run([*inside, "ip", "link", "set", device, "master", bridge, "up"])
        run([*inside, *_shape(device, mbit)])


def connect(switch: int, name: str, pid: int, mbit: float, far: bool) -> None:
    """Plug a host that has just booted into its bridge."""
    port, bridge = _port(name), enter(switch, "net")
    run([*bridge, "ip", "link", "del", port], check=False)
    run([*bridge, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
    run([*bridge, "ip", "link", "set", port, "master", FAR_BRIDGE if far else BRIDGE, "up"])
    host = enter(pid, "net")
    run([*host, "ip", "addr", "add", f"{address(name)}/24", "dev", "eth0"])
    run([*host, "ip", "link", "set", "eth0", "up"])
    slow(switch, name, pid, mbit)


def slow(switch: int, name: str, pid: int, mbit: float) -> None:
    """Set the speed of a host's link, in both directions."""
    check_rate(mbit)
    run([*enter(switch, "net"), *_shape(_port(name), mbit)])
    run([*enter(pid, "net"), *_shape("eth0", mbit)])


def cut(switch: int, name: str) -> None:
    """Take a host off the bridge: its packets vanish, in both directions, and neither side is told."""
    run([*enter(switch, "net"), "ip", "link", "set", _port(name), "nomaster"], check=False)


def join(switch: int, name: str, far: bool) -> None:
    """Put a host back on its bridge."""
    run([*enter(switch, "net"), "ip", "link", "set", _port(name), "master", FAR_BRIDGE if far else BRIDGE])


def links(switch: int) -> dict[str, dict[str, Any]]:
    """Every host's link: `cut`, `mbit`, and the bytes it `sent` and `received` since it was plugged in.

    That of the other region is `SPAN`; it sent what came from there.
    """
    inside = enter(switch, "net")
    devices = json.loads(run([*inside, "ip", "-json", "-stats", "link", "show"]).stdout)
    shapes = json.loads(run([*inside, "tc", "-json", "qdisc", "show"]).stdout)
    rates = {shape["dev"]: shape["options"]["rate"] * 8 / 1e6 for shape in shapes if shape["kind"] == "tbf"}
    return {
        device["ifname"].removeprefix("ctxflow-"): {
            "cut": "master" not in device,
            "mbit": rates.get(device["ifname"]),
            "sent": device["stats64"]["rx"]["bytes"],
            "received": device["stats64"]["tx"]["bytes"],
        }
        for device in devices
        if device["ifname"] in rates
    }
