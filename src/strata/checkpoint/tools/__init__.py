"""What `strata checkpoints` needs: inspect, diff, export, compact, and progress bars."""
