"""Several ranks that save and load one checkpoint together: rank identity, the commit of a group, the common choice."""
