"""One module per measured system, named after its benchmark. Each runs in its own process.

`strata.bench.frame` defines what a contender prints. A contender in the peers' environment does not import Strata.
Modules that are no system (`*_state`, `*_model`, `*_watch`, …) hold what the contenders of one benchmark share.
"""
