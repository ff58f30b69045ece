"""The relay: the coordinator's service for the workers of one node, over one upstream session.

Uses `serve` towards the workers and `client` towards the coordinator. It keeps no durable state and decides nothing
about jobs. `folds` combines heartbeats and barrier arrivals, without I/O.
"""
