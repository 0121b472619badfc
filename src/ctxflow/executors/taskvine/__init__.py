"""The TaskVine engine: workers that a batch system lends, driven through a real ndcctools manager.

`engine` is the run's side, `manager` the program that holds the ndcctools manager in a process of its own, `link` what
joins the two and `manager_messages` what they say, `vine_workers` what is known of workers and how they are called,
`vine_hosts` what they are told, `stagings` and `staging_tree` how contexts' files get to them. What does not live here:
the worker's side (host/), and acquiring workers (factory/).
"""
