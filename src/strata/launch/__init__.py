"""The agent's side of a run: it starts workers, watches them, restarts them after failures and ends the run.

`supervisor`, `failures` and `watchdog` decide without I/O; `agent` carries out their `actions`. `run` puts one run
together, `multi_node` the agents of several machines. May import `coordinator` and `checkpoint`. Workers themselves are
in `strata.train`, which this package never imports.
"""
