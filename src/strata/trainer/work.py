"""What runs on every worker: a fit, an evaluation. Engines call these functions with a session and the job."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from strata.checkpoint import CheckpointManager
from strata.errors import CheckpointError, ConfigError, InvalidArgument, NoCheckpoint, StorageError
from strata.identity import Identity
from strata.trainer import serving, sources
from strata.trainer.assembly import build, build_evaluator
from strata.trainer.callbacks import RunInfo
from strata.trainer.evaluation import summed
from strata.trainer.history import Result
from strata.trainer.loop import Loop
from strata.trainer.metrics.gather import gather_states
from strata.trainer.optimizer import Ema
from strata.trainer.resumption import only_fitting
from strata.trainer.strategy import ServerStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.checkpoint import CheckpointMetadata
    from strata.train.context import Context
    from strata.trainer.batches import Batch
    from strata.trainer.binding import Binding
    from strata.trainer.config import FitConfig
    from strata.trainer.engine import Session
    from strata.trainer.history import History
    from strata.trainer.parts import Parts
    from strata.trainer.trainer import Trainer


EVALUATION_TIMEOUT_S = 3600.0
"""Time for the workers to evaluate, while servers wait for the result."""
_evaluations = itertools.count()


def fit(session: Session, trainer: Trainer, config: FitConfig) -> Result:
    """Train on this worker until the end; return the same result on every rank."""
    ctx = session.context
    if ctx.roles.is_server:
        return serving.run_server(ctx, trainer)
    began_s = time.time()
    _seed(trainer.settings.seed, ctx.rank)
    with _deterministic(is_on=trainer.settings.deterministic):
        parts = build(trainer, config, ctx)
        _attach(ctx, parts.loader)
        loop = Loop(parts, ctx)
        with only_fitting(parts.module, parts.optimizer, ctx.checkpoints):
            ctx.restore(loop.state)
        if ctx.identity.incarnation:
            loop.continue_alone(serving.completed_steps(ctx))
        parts.bound.begin()
        if ctx.may_lose_ranks and getattr(parts.loader, "has_global_state", False):
            ctx.alone.begin()
        if config.is_resumed and not ctx.attempt and not ctx.identity.incarnation:
            parts.history.stop_reason = ""  # the user wants to go on
        with contextlib.closing(parts.callbacks):
            parts.callbacks.on_start(_run_info(parts, ctx))
            with session.on_interrupt(lambda: setattr(loop, "is_interrupted", True)), _known_to(trainer, ctx):
                loop.run()
            with ctx.together("end"):
                ctx.will_end()
                with session.on_interrupt(lambda: setattr(loop, "is_interrupted", True)):
                    loop.end()
                ctx.checkpoints.wait()
                result = _result(loop, ctx, config.started_s or began_s)
            parts.callbacks.on_end(result)
        serving.finish(ctx, result)
        parts.bound.close()
    return result


@contextlib.contextmanager
def _known_to(trainer: Trainer, ctx: Context) -> Iterator[None]:
    trainer.context = ctx
    try:
        yield
    finally:
        trainer.context = None  # it cannot be pickled, and a fit is over


def _result(loop: Loop, ctx: Context, began_s: float) -> Result:
    history = loop.parts.history
    best, servers = _summary(ctx, history)
    first_s, now_s = loop.first_step_s or time.time(), time.time()
    return Result(
        history=history.rows,
        steps=ctx.step,
        best_epoch=history.best_epoch,
        monitor=history.monitor,
        best=best,
        checkpoints=ctx.checkpoints.place,
        timings={"start_s": first_s - began_s, **loop.seconds, "total_s": now_s - began_s},
        stop_reason=loop.stop_reason,
        servers=servers,
        lost_updates=int(summed([float(loop.lost_updates)])[0]),
    )


def evaluate(session: Session, trainer: Trainer, config: FitConfig) -> dict[str, float]:
    """Evaluate the module on `config.train`, on all workers together."""
    ctx, topic = session.context, f"evaluation-{next(_evaluations)}"
    if ctx.roles.is_server:
        found: dict[str, float] = msgspec.json.decode(
            ctx.membership.collect(topic, [0], timeout_s=EVALUATION_TIMEOUT_S)[0]
        )
        return found
    serving.require_values(trainer.module)
    evaluator, loader, _, _ = build_evaluator(trainer, config, ctx.identity, ctx.device)
    with ctx.together(topic), _deterministic(is_on=trainer.settings.deterministic):
        found = evaluator.evaluate(loader)
    if ctx.roles.num_servers and ctx.rank == 0:
        ctx.membership.publish(topic, msgspec.json.encode(found).decode())
    return found


def predict(trainer: Trainer, config: FitConfig) -> Any:
    """Return the predictions for `config.train`, in this process."""
    sources.check_options(config.train, config.data_options)
    serving.require_values(trainer.module)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    evaluator, loader, _, _ = build_evaluator(trainer, config, Identity(), device, needs_target=False)
    with _deterministic(is_on=trainer.settings.deterministic):
        return evaluator.predict(loader)


def example(trainer: Trainer, config: FitConfig) -> tuple[Batch, Binding]:
    """Return a batch of `config.train` without its target, and how it is passed to the module."""
    serving.require_values(trainer.module)
    _, loader, splitter, _ = build_evaluator(trainer, config, Identity(), torch.device("cpu"), needs_target=False)
    raw = next(iter(loader), None)
    if raw is None:
        raise InvalidArgument("the sample has no rows", field="sample")
    batch = splitter(raw)
    assert splitter.binding is not None
    return batch, splitter.binding


def load_weights(trainer: Trainer, place: str, *, chosen: str | None = None) -> None:
    """Load the weights of a checkpoint, by default the newest, into the caller's module, whichever process trained
    them.
    """
    averaged = _Averaged()
    into: dict[str, Any] = {"module": trainer.module}
    if trainer.settings.ema is not None:
        into["trainer"] = averaged
    with CheckpointManager(place, **_storage_options(trainer)) as manager:
        if isinstance(trainer.strategy, ServerStrategy):
            serving.load_weights(trainer, manager, chosen)
        else:
            manager.restore(into, id=chosen)
    if averaged.state is not None:
        ema = Ema()
        ema.load_state_dict(averaged.state)
        ema.copy_to(trainer.module)


def load_newest_weights(trainer: Trainer, place: str) -> None:
    """Load the newest checkpoint of a fit that may be running, and may replace that checkpoint meanwhile.

    Raises:
        NoCheckpoint: There is none yet.
    """
    loaded, newest = "", _newest(trainer, place)
    while loaded != newest:
        loaded = newest
        try:
            load_weights(trainer, place, chosen=loaded)
        except (CheckpointError, StorageError):
            newest = _newest(trainer, place)
            if newest == loaded:
                raise


def _newest(trainer: Trainer, place: str) -> str:
    with CheckpointManager(place, **_storage_options(trainer)) as manager:
        found = manager.latest()
    if found is None:
        raise NoCheckpoint(f"{place} has no checkpoint; wait until the fit has saved one")
    return found.id


def _storage_options(trainer: Trainer) -> dict[str, Any]:
    return {name: value for name, value in trainer.checkpoint_options.items() if name == "storage_options"}


class _Averaged:
    """Receives the averaged weights of a checkpoint."""

    state: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state["ema"]


def _summary(ctx: Context, history: History) -> tuple[CheckpointMetadata | None, list[dict[str, float]]]:
    """Return the checkpoint of the best epoch, or the last one if epochs are not compared; and the figures of the
    servers. All ranks return what rank 0 finds: one that lists the checkpoints itself may still see some that rank 0 is
    about to remove, and servers still serve the others.
    """
    own = _listed_best(ctx, history) if ctx.rank == 0 else None
    servers = serving.figures(ctx) if ctx.rank == 0 else []
    if ctx.world_size == 1:
        return own, servers
    encoded = msgspec.json.encode(["" if own is None else own.id, servers])
    gathered = gather_states([{"found": torch.frombuffer(bytearray(encoded), dtype=torch.uint8)}])
    chosen, servers = msgspec.json.decode(bytes(gathered[0][0]["found"].tolist()))
    return own or next((each for each in ctx.checkpoints.list() if each.id == chosen), None), servers


def _listed_best(ctx: Context, history: History) -> CheckpointMetadata | None:
    found = ctx.checkpoints.list()
    rated = [each for each in found if each.metadata.get(history.monitor) is not None]  # NaN is saved as null
    if not rated:
        return found[-1] if found else None
    pick = min if history.better == "lower" else max
    return pick(rated, key=lambda each: float(each.metadata[history.monitor]))


def _attach(ctx: Context, loader: Any) -> None:
    """
    Raises:
        ConfigError: This process is a launcher's worker and has called `fit` before.
    """
    try:
        ctx.attach(loader, name="train")
    except InvalidArgument as error:
        if error.field != "name":
            raise
        raise ConfigError(
            "a worker that strata run or torchrun started can call fit once; give each fit a script of its own, or run "
            "this one with plain python and Trainer(workers=…)"
        ) from error


def _run_info(parts: Parts, ctx: Context) -> RunInfo:
    num_batches = None
    with contextlib.suppress(TypeError):  # a loader over an IterableDataset has __len__, which raises
        num_batches = len(parts.loader)
    return RunInfo(
        epochs=None if parts.config.is_stream else parts.config.epochs,
        steps_per_epoch=None if num_batches is None else -(-num_batches // parts.settings.accumulate),
        step=ctx.step,
        history=[dict(row) for row in parts.history.rows],
        world_size=ctx.world_size,
        checkpoints=ctx.checkpoints.place,
    )


def _seed(seed: int, rank: int) -> None:
    """Seed all generators. Ranks differ, so that they do not drop out the same units."""
    numbers = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(numbers[0]))
    np.random.seed(int(numbers[1]))
    torch.manual_seed(int(numbers[2]))


@contextlib.contextmanager
def _deterministic(*, is_on: bool) -> Iterator[None]:
    """Use deterministic algorithms only, where torch has a choice."""
    before = torch.are_deterministic_algorithms_enabled()
    if is_on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
