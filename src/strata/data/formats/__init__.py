"""File formats, each behind the port of `base.py`."""
