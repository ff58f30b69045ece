"""Worker processes on one machine: started cold or forked from a warm process, killed with their descendants.

`base` is the port. This folder knows neither nodes nor run directories, and imports only `launch.protocol` and
`launch.environment` of `launch`.
"""
