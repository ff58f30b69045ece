"""The nodes of a run: this machine, agents on other machines, Ray actors; and how agents find each other.

`base` is the port; the agent does not know which implementation it uses, and `launch/run.py` chooses it. This folder
may import `launch.record`, `launch.processes` and the coordinator's client, and never the supervisor or the agent.
"""
