"""`strata bench overhead`: what the runtime costs a training loop, and how soon a job makes its first step."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

BENCHMARK = Benchmark(
    name="overhead",
    title="Overhead",
    contenders=(
        Contender(name="strata", module="strata.bench.contenders.overhead_strata", usual_s=70.0),
        Contender(name="strata start", module="strata.bench.contenders.overhead_start", usual_s=10.0),
        Contender(name="torchrun start", module="strata.bench.contenders.overhead_start_torchrun", usual_s=15.0),
    ),
    figures=(
        Figure(key="overhead_fraction", title="time of a step with the runtime, over that of the bare loop, less 1"),
        Figure(key="noise_fraction", title="… the same of the bare loop and another bare one: what means nothing"),
        Figure(key="overhead_cpu_fraction", title="of the CPU time of the training thread, the same"),
        Figure(key="in_calls_fraction", title="part of a step that is spent in our calls, measured around them"),
        Figure(key="step_ms", title="a step with the runtime, saves included", unit="ms", peers=("bare_step_ms",)),
        Figure(key="bare_step_ms", title="a step of the bare loop", unit="ms"),
        Figure(key="report_us", title="ctx.report", unit="µs"),
        Figure(key="maybe_checkpoint_us", title="ctx.maybe_checkpoint when it is not time", unit="µs"),
        Figure(key="save_stall_ms", title="ctx.maybe_checkpoint when it is: until training goes on", unit="ms"),
        Figure(
            key="start_over_torchrun",
            title="command to first step: ours, over torchrun's",
            quotient=("start_s", "torchrun_start_s"),
        ),
        Figure(key="start_s", title="strata run to the first step", unit="s", peers=("torchrun_start_s",)),
        Figure(key="torchrun_start_s", title="torchrun: command to the first step", unit="s"),
    ),
    rounds=5,
    quick_rounds=1,
    notes=(
        "A step is forward, backward and Adam of a network on one core; its batch is chosen so that it takes 20 ms.",
        "With the runtime: under strata run, a report after every step, a checkpoint every 50 steps.",
        "Three fresh processes a round take turns of 10 steps: ours, and bare twice. All end with the same weights.",
        "What starts is one script for both: 2 gloo ranks with DDP, one step. It knows nothing of us.",
    ),
)
