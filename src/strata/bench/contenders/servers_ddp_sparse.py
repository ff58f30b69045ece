"""DDP with sparse gradients: `nn.Embedding(sparse=True)` in both ranks, whose gradients gloo gathers."""

from __future__ import annotations

import json

from strata.bench.contenders.servers_ddp import figures
from strata.bench.contenders.servers_job import Size


def main() -> None:
    print(json.dumps({"figures": figures("ddp_sparse", Size.given(), is_sparse=True)}))


if __name__ == "__main__":
    main()
