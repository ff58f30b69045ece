"""One module per measured system. Each runs in its own process; `strata.bench.frame` defines what it prints.

A contender in the peers' environment does not import Strata.
"""
