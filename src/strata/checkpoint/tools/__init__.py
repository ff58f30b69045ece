"""What `strata checkpoints` needs: inspection, deletion, diff, export, compaction, and progress bars.

May import every other folder of `checkpoint` but `adapters`. Nothing here commits: compaction uses `group/commit.py`.
Verification is in `load/integrity.py`.
"""
