"""From files to a plan: survey the files once, prune by statistics, count the rows that pass the filter, pack splits.

`surveyor`, `row_counts` and `probe` read files through `formats`, and `cache` keeps surveys on disk; the other modules
do no I/O. A plan is immutable and the same on every rank. Files and Iceberg tables share these modules. They may import
`formats`, `filter` and `source`, and never `batch` or `runtime`.
"""
