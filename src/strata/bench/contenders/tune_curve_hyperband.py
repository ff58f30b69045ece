"""Strata: Hyperband on two workers."""

from __future__ import annotations

from strata.bench.contenders.tune_curve_strata import main

if __name__ == "__main__":
    main("hyperband", "hyperband_")
