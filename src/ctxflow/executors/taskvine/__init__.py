"""The TaskVine engine: workers that a batch system lends, driven through a real ndcctools manager.

`engine` is the run's side, `manager` the program that holds the ndcctools manager, behind the `gate`; `manager_process`
starts it, and `manager_messages` is what passes between them. `vine_workers` is what is known of workers, `vine_hosts`
what they are told; `stagings` and `worker_transfers` bring them files.
"""
