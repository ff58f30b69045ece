"""WebDataset shards: tar files in which consecutive members with the same key are the parts of one sample.

`headers` walks a tar from header to header, `samples` groups members into samples and row groups, `index` is the file
beside a shard that saves the walk, `format` implements the port. Nothing here extracts a file, and only `index.write`
writes one.
"""
