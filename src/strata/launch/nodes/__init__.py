"""The nodes of a run: this machine, agents on other machines, Ray actors; and how agents find each other.

`base` is the port; the agent does not know which implementation it uses. This folder may import `launch.record` and
`launch.processes`, and never the supervisor or the agent.
"""
