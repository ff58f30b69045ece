"""`strata bench models`: the AUC of the reference models on two public data sets, over several seeds."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure, Setting

EMBEDDING_DIM = 16
HIDDEN = (64, 64)
LEARNING_RATE = 0.003
WEIGHT_DECAY = 0.01
"""The best of four settings on the validation rows of MovieLens with one seed; flights uses the same."""
MAX_EPOCHS = 15
QUICK_ROWS = 20_000
DATA_SETS = {"flights": "flights", "movielens": "MovieLens"}
MODELS = {
    "lr": "LR",
    "fm": "FM",
    "fnn": "FNN",
    "pnn_inner": "PNN, inner",
    "pnn_outer": "PNN, outer",
    "wide_deep": "Wide & Deep",
    "deepfm": "DeepFM",
    "dcnv2": "DCN V2",
    "dlrm": "DLRM",
    "two_tower": "Two-tower",
}
BASELINE = "lr"


def _over_baseline(data: str, model: str) -> Figure:
    return Figure(
        key=f"{data}_auc_{model}_over_{BASELINE}",
        title=f"{DATA_SETS[data]}, AUC: {MODELS[model]} / {MODELS[BASELINE]}",
        better="higher",
        quotient=(f"{data}_auc_{model}", f"{data}_auc_{BASELINE}"),
    )


def _auc(data: str, model: str) -> Figure:
    return Figure(key=f"{data}_auc_{model}", title=f"{DATA_SETS[data]}, AUC: {MODELS[model]}", better="higher")


BENCHMARK = Benchmark(
    name="models",
    title="Reference models",
    contenders=tuple(
        Contender(name=name, module=f"strata.bench.contenders.models_{name}", usual_s=70.0, timeout_s=900.0)
        for name in DATA_SETS
    ),
    figures=(
        *(_over_baseline(data, model) for data in DATA_SETS for model in MODELS if model != BASELINE),
        *(_auc(data, model) for data in DATA_SETS for model in MODELS),
    ),
    rounds=5,
    quick_rounds=1,
    settings=(Setting(name="rows", title="rows of each data set (default 500000 and 100000)", at_least=1_000),),
    notes=(
        "The seed is the number of the round; all models have the same rows, settings and seeds.",
        "Flights: vega-datasets 3.2.1, late by more than 15 minutes; 300,000 rows to train on, 100,000 to validate",
        "… and 100,000 to test, batches of 2,048. Features: origin, destination, hour, weekday, month, distance.",
        "MovieLens 100k: recbole 1.2.1, a rating of 4 or 5; 80,000 rows to train on, 10,000 to validate and 10,000",
        "… to test, batches of 512. Features: user, item, gender, occupation, genres, age, year.",
        f"Embeddings of {EMBEDDING_DIM}, hidden layers of {' and '.join(map(str, HIDDEN))} units, no dropout; AdamW,",
        f"… learning rate {LEARNING_RATE}, weight decay {WEIGHT_DECAY}.",
        f"Training ends when the validation AUC falls, at most after {MAX_EPOCHS} epochs; the best epoch is tested.",
        "FNN starts from the trained FM; Wide & Deep crosses origin with destination and hour, item with gender and",
        "… occupation.",
        "Two-tower: the towers are the route's start and time, and its end; the user, and the movie. Trained like the",
        "… others, on given pairs.",
    ),
)
