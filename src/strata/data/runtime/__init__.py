"""The running loader: decode threads and processes, prefetch, the pipeline that joins them, and its metrics.

The only folder of `strata.data` that starts threads and processes. Decides nothing about row order: `order` does.
"""
