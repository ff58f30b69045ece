"""Worker processes on one machine: started cold or forked from a warm process, killed with their descendants."""
