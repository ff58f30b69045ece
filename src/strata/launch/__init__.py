"""Putting the parts of Strata to work together in a training process."""
