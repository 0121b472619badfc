"""The programs that the testbed needs of this machine, and the Debian packages that hold them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .progress import work
from .settings import MINUTES, CannotBuild, TestbedError

PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "chroot": "coreutils",
    "ip": "iproute2",
    "tc": "iproute2",
}
TO_BUILD = {"debootstrap": "debootstrap debian-archive-keyring"}
"""What is needed beyond these while there is no cached root."""

# The lists of packages are read anew only if they name no such package, or one that is there no more.
INSTALL = """
install() { apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"; }
install "$@" || { apt-get -o Acquire::Check-Valid-Until=false -o Acquire::Retries=3 update && install "$@"; }
"""


def missing(to_build: bool) -> dict[str, str]:
    """The programs that are needed and not there, with the packages that hold them; `to_build`: a root, too."""
    needed = PACKAGES | (TO_BUILD if to_build else {})
    return {tool: packages for tool, packages in needed.items() if not shutil.which(tool)}


def check(lacking: dict[str, str]) -> None:
    """Say which program has to be installed by hand, if any.

    :raises CannotBuild: something is missing, and there is no apt-get that could install it.
    """
    if lacking and not shutil.which("apt-get"):
        tool, packages = next(iter(lacking.items()))
        raise CannotBuild(f"The testbed needs the program {tool}: install the package {packages.split()[0]}.")


def install(lacking: dict[str, str], log: Path) -> None:
    """Install what is missing from this machine's own Debian or Ubuntu, and say so; root is needed.

    :raises CannotBuild: it could not be installed.
    """
    check(lacking)
    if not lacking:
        return
    packages = sorted({name for names in lacking.values() for name in names.split()})
    command = ["sh", "-c", INSTALL, "sh", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        work(f"Installing {', '.join(packages)} with apt-get", command, log, 10 * MINUTES, environment, fenced=False)
    except TestbedError as error:
        raise CannotBuild(str(error)) from None
    if still := missing(bool(lacking.keys() & TO_BUILD)):
        raise CannotBuild(f"The testbed needs the program {next(iter(still))}, and apt-get did not bring it.")
