"""The record of a run: its directory, timeline and logs; `view` draws its state, `display` shows it live.

It may import `launch.processes`, `launch.environment`, `launch.protocol` and `launch.spec`. It never starts or kills
processes.
"""
