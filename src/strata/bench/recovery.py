"""`strata bench recovery`: from `kill -9` of a worker to the next training step, beside those who also restart jobs."""

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
            title="kill to next step: ours, over the faster one's of the others",
            quotient=("recovery_s", "torchrun_recovery_s", "ray_train_recovery_s"),
        ),
        Figure(
            key="recovery_over_torchrun",
            title="kill to next step: ours, over torchrun's",
            quotient=("recovery_s", "torchrun_recovery_s"),
        ),
        Figure(
            key="recovery_over_ray_train",
            title="kill to next step: ours, over Ray Train's",
            quotient=("recovery_s", "ray_train_recovery_s"),
        ),
        Figure(
            key="start_over_torchrun",
            title="command to first step: ours, over torchrun's",
            quotient=("start_s", "torchrun_start_s"),
        ),
        Figure(
            key="recovery_s",
            title="kill -9 of a worker to the next step",
            unit="s",
            peers=("torchrun_recovery_s", "ray_train_recovery_s"),
        ),
        Figure(key="detection_s", title="… until the agent knows", unit="s"),
        Figure(key="restart_s", title="… until the others have ended and new ones begin", unit="s"),
        Figure(key="restore_s", title="… until the last checkpoint is loaded", unit="s"),
        Figure(key="first_step_s", title="… until the first step is made", unit="s"),
        Figure(key="start_s", title="strata run to the first step", unit="s", peers=("torchrun_start_s",)),
        Figure(key="torchrun_recovery_s", title="torchrun: kill -9 of a worker to the next step", unit="s"),
        Figure(key="torchrun_start_s", title="torchrun: command to the first step", unit="s"),
        Figure(key="torchrun_lost_jobs", title="torchrun: jobs that did not come back, and are not measured"),
        Figure(key="ray_train_recovery_s", title="Ray Train: kill -9 of a worker to the next step", unit="s"),
        Figure(key="ray_train_start_s", title="Ray Train: command to the first step", unit="s"),
        Figure(key="ray_train_lost_jobs", title="Ray Train: jobs that did not come back, and are not measured"),
    ),
    rounds=5,
    quick_rounds=1,
    notes=(
        "2 gloo ranks train a small network with DDP and Adam, 20 ms a step; saved every 10 steps, one killed at 25.",
        "torchrun restarts all workers, too; its job uses torch.save in the training thread, its rows are in memory.",
        "A restart of torchrun's in which gloo does not connect is followed by another one, and counts.",
        "A peer's job that has not come back 90 s after its start is counted as lost; torchrun gets a second one.",
        "Ray Train (FailureConfig) does, too, with the same job; its start is also that of a Ray cluster.",
        "Ours reads its rows from Parquet, shuffled, saves asynchronously, and goes on at the exact row.",
    ),
)
