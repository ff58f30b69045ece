"""Where workers can run: this machine, agents on other machines, Ray actors; and how agents find each other.

`base` is the port; the agent does not know which implementation it talks to.
"""
