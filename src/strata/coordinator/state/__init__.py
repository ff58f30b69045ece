"""The state machines of the coordinator: jobs, membership, shards, barriers, checkpoints, commands.

Pure: calls and times in, events and answers out. No clock, no sockets, no disk, no randomness. Imports only `errors`,
`printing` and `coordinator.config`.
"""
