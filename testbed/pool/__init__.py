"""The testbed's own code: the standard library alone, since it runs before anything is installed.

`settings` says what a pool is, `gpus` what its hosts advertise, `nvidia_smi` stands for their GPUs' driver, `condor`
says how HTCondor is configured; `tools` are the programs that it takes, `root` builds the Debian root that every host
runs, `machine` finds and enters hosts, `network` joins them, `cluster` brings the whole up and down, `commands` is what
a person calls. Nothing here belongs to the package `ctxflow`, which is only installed into the root.
"""
