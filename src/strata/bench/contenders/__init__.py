"""The modules that measure, each run in its own process; see `strata.bench.frame` for what they print."""
