"""HTCondor's configuration, one text per host; paths are the same on all, since each has its own mounts."""

from __future__ import annotations

from .settings import DOMAIN, SUBMIT, WORKER_CPUS, WORKER_MEMORY_MB, Settings, address

COMMON = """\
# Who is who
CONDOR_HOST = {manager}
NETWORK_INTERFACE = {address}
NETWORK_HOSTNAME = {name}.{domain}
BIND_ALL_INTERFACES = False
ENABLE_IPV6 = False
NO_DNS = True
DEFAULT_DOMAIN_NAME = {domain}
UID_DOMAIN = {domain}
TRUST_UID_DOMAIN = True
FILESYSTEM_DOMAIN = {name}.{domain}
RUN = /run/condor
LOCK = /run/condor/lock
LOG = /var/log/condor
SPOOL = /var/spool/condor
EXECUTE = /var/lib/condor/execute
DAEMON_SOCKET_DIR = /run/condor/sockets

# Daemons know each other by the pool's password, users their own host's daemons by the file system
use SECURITY:HOST_BASED
SEC_DEFAULT_AUTHENTICATION = REQUIRED
SEC_DEFAULT_AUTHENTICATION_METHODS = FS, PASSWORD
SEC_READ_AUTHENTICATION = OPTIONAL
SEC_CLIENT_AUTHENTICATION = OPTIONAL
SEC_PASSWORD_FILE = /run/condor/password
ALLOW_READ = *
ALLOW_WRITE = *@{domain}
ALLOW_CLIENT = *
ALLOW_ADMINISTRATOR = root@{domain}, condor@{domain}, condor@password
ALLOW_DAEMON = root@{domain}, condor@{domain}, condor@password
ALLOW_NEGOTIATOR = root@{domain}, condor@{domain}, condor@password

# Seconds, where a campus has minutes: matches within a few seconds, a lost host forgotten in half a minute
UPDATE_INTERVAL = 5
MASTER_UPDATE_INTERVAL = 30
CLASSAD_LIFETIME = 25
ALIVE_INTERVAL = 5
MAX_CLAIM_ALIVES_MISSED = 4
JOB_DEFAULT_LEASE_DURATION = 20
TCP_KEEPALIVE_INTERVAL = 5
STARTER_UPDATE_INTERVAL = 10
SHADOW_QUEUE_UPDATE_INTERVAL = 10
MASTER_BACKOFF_CONSTANT = 1
MASTER_BACKOFF_CEILING = 3
RUNBENCHMARKS = False

# Namespaces do not fence off the kernel's settings: its tuning would change them for the whole machine
ENABLE_KERNEL_TUNING = False
ENABLE_SSH_TO_JOB = False

# Else Python programs are asked for each job which URLs they fetch, and nobody here gives one
ENABLE_URL_TRANSFERS = False
"""

SUBMIT_HOST = """\
DAEMON_LIST = MASTER COLLECTOR NEGOTIATOR SCHEDD
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
NEGOTIATOR_UPDATE_INTERVAL = 30
SCHEDD_INTERVAL = 2
SCHEDD_MIN_INTERVAL = 1
PERIODIC_EXPR_INTERVAL = 5
SCHEDD_CLUSTER_INITIAL_VALUE = 1
MAX_JOBS_RUNNING = 200
JOB_START_DELAY = 0
PREEMPTION_REQUIREMENTS = RemoteUserPrio > TARGET.SubmitterUserPrio * 1.2
NEGOTIATOR_CONSIDER_PREEMPTION = True
ALLOW_PSLOT_PREEMPTION = True
DEFAULT_PRIO_FACTOR = 1000
"""

EXECUTE_HOST = """\
DAEMON_LIST = MASTER STARTD
NUM_CPUS = {cpus}
MEMORY = {memory}
MACHINE_RESOURCE_INVENTORY_GPUs = /bin/cat /run/testbed/gpus
USER_JOB_WRAPPER = /checkout/testbed/job-wrapper
MachineMaxVacateTime = 10
KILLING_TIMEOUT = 5
MAXJOBRETIREMENTTIME = 0
CLAIM_WORKLIFE = 60
POLLING_INTERVAL = 2
"""

PARTITIONABLE = """\
NUM_SLOTS_TYPE_1 = 1
SLOT_TYPE_1 = 100%
SLOT_TYPE_1_PARTITIONABLE = True
"""

STATIC = """\
NUM_SLOTS_TYPE_1 = {slots}
SLOT_TYPE_1 = cpus={cpus}, memory={memory}, disk={share}%, swap={share}%, gpus={gpus}
SLOT_TYPE_1_PARTITIONABLE = False
"""


def configuration(name: str, settings: Settings) -> str:
    """The configuration of one host, to lie alone in its /etc/condor/config.d."""
    text = COMMON.format(manager=address(SUBMIT), address=address(name), name=name, domain=DOMAIN)
    if name == SUBMIT:
        return text + SUBMIT_HOST
    text += EXECUTE_HOST.format(cpus=settings.cpus, memory=settings.memory_mb)
    if not settings.static:
        return text + PARTITIONABLE
    slots = max(1, settings.gpus)
    return text + STATIC.format(
        slots=slots, cpus=WORKER_CPUS, memory=WORKER_MEMORY_MB, share=100 // slots, gpus=min(1, settings.gpus)
    )


def slots(settings: Settings) -> int:
    """How many slots condor_status lists when the pool is up and idle."""
    return settings.hosts * (max(1, settings.gpus) if settings.static else 1)
