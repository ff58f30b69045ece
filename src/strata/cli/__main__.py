"""`python -m strata.cli` is `strata`."""

from strata.cli import main

main()
