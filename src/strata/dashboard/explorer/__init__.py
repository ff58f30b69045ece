"""The checkpoint explorer: look into checkpoints and safetensors files without restoring them.

    places, contents       where checkpoints are, and the bytes of their tensors (storage)
    tree, timeline, change lists, searches, lineage and rankings (pure)
    histogram, matrix      arithmetic on pieces of tensors (pure)
    scan, workroom         long questions over several requests; threads and verifications
    explorer               answers one question within a `Budget` of bytes and time
    models, routes, server the HTTP API, and a server without a coordinator

A request names places, checkpoints and tensors by their listed names. Nothing in a request becomes a path, and nothing
here writes to a store.
"""
