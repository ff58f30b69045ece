"""The dashboard: a page on the HTTP port of a coordinator, its API, live updates, history and checkpoint explorer.

`extension.Dashboard` is what `strata coordinator` and `strata run` hand to the coordinator's HTTP server. One sample of
all jobs a second feeds everything else: `history` keeps it in downsampled series, `live` sends what changed, `http` has
the routes. `explorer` reads checkpoints and `studies` the journals of studies; both need no coordinator. Modules
outside folders are pure, except `sampler` and `run`. May import every layer below, never `cli`.
"""
