"""`strata bench overhead`: the cost of the runtime in a training loop, and the time to a job's first step."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

BENCHMARK = Benchmark(
    name="overhead",
    title="Overhead",
    contenders=(
        Contender(name="strata", module="strata.bench.contenders.overhead_strata", usual_s=70.0),
        Contender(name="strata collectives", module="strata.bench.contenders.overhead_collectives", usual_s=5.0),
        Contender(name="strata start", module="strata.bench.contenders.overhead_start", usual_s=10.0),
        Contender(name="torchrun start", module="strata.bench.contenders.overhead_start_torchrun", usual_s=15.0),
    ),
    figures=(
        Figure(key="overhead_fraction", title="step time with Strata / plain loop, minus 1"),
        Figure(key="noise_fraction", title="… plain loop / another plain loop, minus 1: the noise"),
        Figure(key="overhead_cpu_fraction", title="… CPU time of the training thread, minus 1"),
        Figure(key="in_calls_fraction", title="share of a step spent in Strata's calls"),
        Figure(key="step_ms", title="step with Strata, including saves", unit="ms", peers=("bare_step_ms",)),
        Figure(key="bare_step_ms", title="step of the plain loop", unit="ms"),
        Figure(key="report_us", title="ctx.report", unit="µs"),
        Figure(key="maybe_checkpoint_us", title="ctx.maybe_checkpoint without a save", unit="µs"),
        Figure(key="save_stall_ms", title="ctx.maybe_checkpoint with a save: training stall", unit="ms"),
        Figure(key="collective_ddp_us", title="measuring the waits of DDP, per step", unit="µs"),
        Figure(key="collective_call_us", title="measuring another wait in a collective", unit="µs"),
        Figure(
            key="start_over_torchrun",
            title="command to first step: Strata / torchrun",
            quotient=("start_s", "torchrun_start_s"),
        ),
        Figure(key="start_s", title="strata run: command to first step", unit="s", peers=("torchrun_start_s",)),
        Figure(key="torchrun_start_s", title="torchrun: command to first step", unit="s"),
    ),
    rounds=5,
    quick_rounds=1,
    notes=(
        "A step is forward, backward and Adam on one core; the batch size is chosen so that a step takes 20 ms.",
        "With Strata: under strata run, a report after every step, a checkpoint every 50 steps.",
        "In each round, Strata and two plain loops alternate every 10 steps, and end with the same weights.",
        "Waits in collectives: a DDP module with 100 parameters, with and without measuring in alternation.",
        "Start: the same script for both, 2 gloo ranks with DDP and one step. It does not import Strata.",
    ),
)
