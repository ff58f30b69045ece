"""`strata demo`: a coordinator, a few worker processes, one of which is killed, and what the others make of it."""

from strata.demo.show import DemoConfig, run

__all__ = ["DemoConfig", "run"]
