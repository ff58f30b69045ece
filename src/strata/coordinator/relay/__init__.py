"""The relay: the same service for the workers of one node, with one session upstream."""
