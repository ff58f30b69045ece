"""The agent's side of a run: it starts workers, watches them, restarts them after failures and ends the run.

`supervisor` and `watchdog` decide without I/O; `agent` carries out. Workers themselves are in `strata.train`, which
this package never imports.
"""
