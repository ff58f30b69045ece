"""Which row comes next: pure arithmetic on (plan, seed, epoch, position).

No I/O, no threads, no clock, no torch. Resume and resize are calculations here, so tests need no processes. Never
imports another folder of `strata.data`.
"""
