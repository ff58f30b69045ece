"""The search space: parameters, the conditions under which they apply, and constraints between them.

No randomness of its own: a parameter maps a number in [0, 1) to a value, and samplers supply the numbers. Only `space`
reads and writes files, as YAML.
"""

from strata.tune.space.space import SearchSpace

__all__ = ["SearchSpace"]
