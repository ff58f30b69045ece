"""torchrun: from the command to the first step of the same script."""

from __future__ import annotations

import json

from strata.bench.contenders.overhead_start import NUM_RANKS, first_step_s


def main() -> None:
    start_s = first_step_s("torch.distributed.run", f"--nproc-per-node={NUM_RANKS}", "--standalone")
    print(json.dumps({"figures": {"torchrun_start_s": start_s}}))


if __name__ == "__main__":
    main()
