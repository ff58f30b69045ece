"""The record of a run: its directory, timeline and logs, and the live display.

It may import `launch.processes`, `launch.environment`, `launch.protocol` and `launch.spec`. It never starts or kills
processes.
"""
