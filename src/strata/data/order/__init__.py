"""Row order: which row comes next, as pure arithmetic on (rows per split, seed, epoch, position).

`order` gives the n-th row of an epoch, `steps` the batches of each rank, `schedule` the row groups that a rank's
batches need, `cursor` the position to resume from. `bins` does the same as `steps` and `schedule` for batches by bytes
or tokens. `map_rows` is the order of map-style datasets, `mixture` that of datasets mixed by weights, with its position
in `mix_cursor`. `assignment` only decides which decode thread reads a row group, and does not affect the order.

No I/O, no threads, no clock, no torch. Resuming and resizing are calculations here, so tests need no processes. This
folder never imports another part of `strata.data`.
"""
