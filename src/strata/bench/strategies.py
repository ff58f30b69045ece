"""`strata bench strategies`: the AUC of one model with each strategy of the Trainer, over several seeds.

Asynchronous workers use rows that other workers have changed since, or are about to change. This benchmark measures
what that costs in quality, at the same number of epochs.
"""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure, Setting

EMBEDDING_DIM = 16
HIDDEN = (64, 64)
LEARNING_RATE = 0.03
EPOCHS = 3
WORKERS = 2
QUICK_ROWS = 20_000
DATA_SETS = {"flights": "flights", "movielens": "MovieLens"}
SYNC = "sync"
STRATEGIES = {
    SYNC: "AllReduce()",
    "hybrid": "Hybrid(sparse=ParameterServer())",
    "hybrid_async": "Hybrid(sparse=ParameterServer(staleness=None))",
    "async": "ParameterServer(staleness=None)",
}


def auc_key(data: str, strategy: str) -> str:
    return f"auc_{data}_{strategy}"


def difference_key(data: str, strategy: str) -> str:
    return f"auc_{data}_{strategy}_minus_{SYNC}"


BENCHMARK = Benchmark(
    name="strategies",
    title="Strategies",
    contenders=tuple(
        Contender(name=name, module=f"strata.bench.contenders.strategies_{name}", usual_s=80.0, timeout_s=1_800.0)
        for name in DATA_SETS
    ),
    figures=(
        *(
            Figure(
                key=difference_key(data, strategy),
                title=f"{title}, AUC: {STRATEGIES[strategy]} - {STRATEGIES[SYNC]}",
                better="higher",
            )
            for data, title in DATA_SETS.items()
            for strategy in STRATEGIES
            if strategy != SYNC
        ),
        *(
            Figure(key=auc_key(data, strategy), title=f"{title}, AUC: {STRATEGIES[strategy]}", better="higher")
            for data, title in DATA_SETS.items()
            for strategy in STRATEGIES
        ),
    ),
    rounds=5,
    quick_rounds=1,
    settings=(Setting(name="rows", title="rows of each data set (default 200000 and 100000)", at_least=1_000),),
    notes=(
        "The seed is the number of the round: it decides the rows of the splits, their order and the initial weights.",
        "A difference is between two fits with the same seed.",
        f"DeepFM with embeddings of {EMBEDDING_DIM} and hidden layers of {' and '.join(map(str, HIDDEN))} units;",
        f"… Adagrad with learning rate {LEARNING_RATE}; {WORKERS} workers, and one server that holds all embeddings.",
        f"{EPOCHS} epochs with every strategy; the epoch with the best AUC on the validation rows is tested.",
        "Flights: vega-datasets 3.2.1, late by more than 15 minutes; a sample of 200,000 rows: 120,000 to train on,",
        "… 40,000 to validate and 40,000 to test; batches of 1,024 on each worker.",
        "MovieLens 100k: recbole 1.2.1, a rating of 4 or 5; 80,000 rows to train on, 10,000 to validate and 10,000",
        "… to test; batches of 256 on each worker.",
    ),
)
