"""Studies on the dashboard: trials, curves and what follows from them, read from the journal of a study.

    source          the studies that requests may name; each follows its journal while someone looks (disk)
    figures         what is shown of a state: rows, curves, histories, fronts, each thinned to a bound (pure)
    models, routes  the HTTP API

The journal has all facts of a study before anything follows from them, so a running study, one of another process and
one that is over are shown in the same way. May import `tune`; never changes a journal.
"""
