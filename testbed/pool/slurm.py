"""Slurm's configuration, the same text on all hosts, and how its daemons are started on one.

Slurm lends the very hosts that HTCondor lends, and neither knows of the other: a test uses one at a time.
"""

from __future__ import annotations

import re

from .gpus import Gpu, Model, gpus_of
from .machine import run
from .settings import SUBMIT, Settings, address

COMMON = """\
ClusterName=testbed
SlurmctldHost={manager}({manager_address})
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log

# Hosts share one machine's processes and devices: nothing is enforced, cores and memory are only counted
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
TaskProlog=/checkout/testbed/task-prolog

# Seconds, where a campus has minutes
KillWait=5
MinJobAge=120
SlurmdTimeout=60
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=3,requeue_delay=1

# Refused when they are submitted, not left waiting for ever
EnforcePartLimits=ALL

# The owner takes machines back, as with HTCondor: jobs of others get their signal, and 10 s until they are queued again
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptParameters=send_user_signal
JobRequeue=1
"""

PARTITIONS = """\
PartitionName=campus Nodes={nodes} Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=10
PartitionName=owners Nodes={nodes} MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF AllowGroups=bob
"""

UNUSABLE = re.compile(r"down|drain|drng|fail|unk|\*")
"""What the states of nodes, as `nodes` gives them, have in them that take no jobs."""

START = """\
set -e
runs() { grep -qsx "$1" /proc/[0-9]*/comm; }
install -d -m 755 -o munge -g munge /run/munge
install -m 400 -o munge -g munge /etc/slurm/munge.key /run/munge/munge.key
install -d -m 755 -o slurm -g slurm /run/slurm /var/log/slurm /var/spool/slurmctld
install -d -m 755 /var/spool/slurmd
sed -n "s/^NodeName=$(hostname) .*File=//p" /etc/slurm/gres.conf | xargs -r -n 1 ln -sf /dev/null
runs munged || setpriv --reuid munge --regid munge --clear-groups \\
    munged --key-file=/run/munge/munge.key --num-threads=2 \\
    --pid-file=/run/munge/munged.pid --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed
runs $0 || exec $0
"""
"""Starts Slurm's daemon, which is its first word, and munge before it, as root on a host, unless they run."""


def word(model: Model) -> str:
    """What Slurm calls a GPU's model.

    >>> word(Model("NVIDIA TITAN X (Pascal)", 69, 6.1, 12288, 0.71))
    'titan_x_pascal'
    """
    return re.sub(r"[^a-z0-9]+", "_", model.name.removeprefix("NVIDIA ").lower()).strip("_")


def configuration(settings: Settings) -> dict[str, str]:
    """The files of /etc/slurm, alike on all hosts."""
    found = gpus_of(settings)
    nodes, devices = [], []
    for name in settings.execute_hosts:
        mine = found.get(name, [])
        nodes.append(
            f"NodeName={name} NodeAddr={address(name)} CPUs={settings.cpus} RealMemory={settings.memory_mb}"
            + (f" Gres={_gres(mine)}" if mine else "")
        )
        for number, gpu in enumerate(mine):
            devices.append(f"NodeName={name} Name=gpu Type={word(gpu.model)} File=/run/testbed/gpu{number}")
    common = COMMON.format(manager=SUBMIT, manager_address=address(SUBMIT))
    partitions = PARTITIONS.format(nodes=",".join(settings.execute_hosts))
    return {
        "slurm.conf": "\n".join([common, *nodes, "", partitions]),
        "gres.conf": "\n".join(["AutoDetect=off", *devices, ""]),
        "cgroup.conf": "CgroupPlugin=disabled\n",
    }


def nodes(submit: list[str]) -> dict[str, str]:
    """Every execute host's state as Slurm sees it, host1 first; none where Slurm does not answer.

    :param submit: the words that run a command on the submit host.
    """
    answer = run([*submit, "sinfo", "--noheader", "--Node", "--partition=campus", "--format=%N %t"], check=False)
    found = dict(line.split() for line in answer.stdout.splitlines())
    return dict(sorted(found.items(), key=lambda each: address(each[0]).split(".")[-1].zfill(3)))


def daemon(name: str) -> str:
    """The daemon that a host runs."""
    return "slurmctld" if name == SUBMIT else "slurmd"


def _gres(gpus: list[Gpu]) -> str:
    models = [gpu.model for gpu in gpus]
    return ",".join(f"gpu:{word(model)}:{models.count(model)}" for model in dict.fromkeys(models))
