"""From files to a plan: survey the files once, prune by statistics, count the rows that pass the filter, pack splits.

`surveyor` and `row_counts` read files through `formats`; the other modules are pure. A plan is immutable and the same
on every rank. Files and Iceberg tables share these modules. Never imports `runtime`.
"""
