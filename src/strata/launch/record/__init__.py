"""What a run leaves behind and shows: its directory, timeline, logs, causes of failure, and the live view."""
