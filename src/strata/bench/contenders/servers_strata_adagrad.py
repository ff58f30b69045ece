"""Strata with Adagrad of every weight instead of row-wise Adagrad: the optimizer that DDP has."""

from __future__ import annotations

import json

from strata.bench.contenders.servers_job import LR, Size
from strata.bench.contenders.servers_strata import figures
from strata.servers.table.optimizers import Adagrad


def main() -> None:
    print(json.dumps({"figures": figures("strata_adagrad", Size.given(), Adagrad(lr=LR))}))


if __name__ == "__main__":
    main()
