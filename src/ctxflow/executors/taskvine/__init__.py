"""The TaskVine engine: workers that a batch system lends, driven through a real ndcctools manager.

`engine` is the run's side, `manager` the program that holds the ndcctools manager in a process of its own,
`link` what joins the two, `tree` who sends which file to whom, `files` what is sent, `connection` how others find
a run. What does not live here: the worker's side (host/), and acquiring workers (factory/).
"""
