"""The state of a study: its trials, and what follows from each event. Pure: events and times in, facts and actions out.

It may use `schedulers`. The journal stores the facts, and applying them again gives the same state.
"""
