"""The node cache: row groups that the processes of one machine share, so that each is read and decoded once.

    keys (what makes two row groups equal) → cache (files in shared memory, claims, room) → row groups as Arrow tables

`eviction` decides what is dropped, `keeper` removes the files after the last process. May import the folders of `data`
below `batch`. It never changes what is delivered: whatever fails here, the row group is decoded privately and counted.
"""
