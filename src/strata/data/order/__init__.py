"""Row order: which row comes next, as pure arithmetic on (rows per split, seed, epoch, position).

No I/O, no threads, no clock, no torch. Resuming and resizing are calculations here, so tests need no processes. This
folder never imports another part of `strata.data`.
"""
