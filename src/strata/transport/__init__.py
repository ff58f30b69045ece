"""How processes reach each other: addresses and gRPC channels."""
