"""`strata bench recovery`: from `kill -9` of a worker to the next training step, against torchrun and Ray Train."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

BENCHMARK = Benchmark(
    name="recovery",
    title="Recovery",
    contenders=(
        Contender(name="strata", module="strata.bench.contenders.recovery_strata", timeout_s=120.0, usual_s=15.0),
        Contender(name="torchrun", module="strata.bench.contenders.recovery_torchrun", timeout_s=210.0, usual_s=40.0),
        Contender(name="Ray Train", module="strata.bench.contenders.recovery_ray", timeout_s=120.0, usual_s=45.0),
    ),
    figures=(
        Figure(
            key="recovery_over_fastest",
            title="kill to next step: Strata / faster peer",
            quotient=("recovery_s", "torchrun_recovery_s", "ray_train_recovery_s"),
        ),
        Figure(
            key="recovery_over_torchrun",
            title="kill to next step: Strata / torchrun",
            quotient=("recovery_s", "torchrun_recovery_s"),
        ),
        Figure(
            key="recovery_over_ray_train",
            title="kill to next step: Strata / Ray Train",
            quotient=("recovery_s", "ray_train_recovery_s"),
        ),
        Figure(
            key="start_over_torchrun",
            title="command to first step: Strata / torchrun",
            quotient=("start_s", "torchrun_start_s"),
        ),
        Figure(
            key="recovery_s",
            title="strata run: kill -9 of a worker to the next step",
            unit="s",
            peers=("torchrun_recovery_s", "ray_train_recovery_s"),
        ),
        Figure(key="detection_s", title="… failure detected", unit="s"),
        Figure(key="restart_s", title="… workers restarted", unit="s"),
        Figure(key="restore_s", title="… checkpoint restored", unit="s"),
        Figure(key="first_step_s", title="… first step finished", unit="s"),
        Figure(key="start_s", title="strata run: command to first step", unit="s", peers=("torchrun_start_s",)),
        Figure(key="torchrun_recovery_s", title="torchrun: kill -9 of a worker to the next step", unit="s"),
        Figure(key="torchrun_start_s", title="torchrun: command to first step", unit="s"),
        Figure(key="torchrun_lost_jobs", title="torchrun: jobs that did not recover and are not measured"),
        Figure(key="ray_train_recovery_s", title="Ray Train: kill -9 of a worker to the next step", unit="s"),
        Figure(key="ray_train_start_s", title="Ray Train: command to first step", unit="s"),
        Figure(key="ray_train_lost_jobs", title="Ray Train: jobs that did not recover and are not measured"),
    ),
    rounds=5,
    quick_rounds=1,
    notes=(
        "2 gloo ranks train a small network with DDP and Adam, 20 ms per step; saved every 10 steps, killed at 25.",
        "Strata reads shuffled Parquet rows, saves asynchronously and resumes at the exact row.",
        "torchrun and Ray Train (FailureConfig) restart all workers; their job uses torch.save and rows in memory.",
        "If gloo does not connect after a restart of torchrun, torchrun restarts again; that time counts.",
        "A peer's job that has not recovered 90 s after its start counts as lost; torchrun gets a second try.",
        "The start of Ray Train includes the start of a Ray cluster.",
    ),
)
