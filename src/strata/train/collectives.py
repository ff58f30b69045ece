"""Measure how long the training thread waits in collectives of torch, without any call in the script.

All waits of Python code end in `Work.wait`: those of `dist.all_reduce` and of its siblings, however they were imported,
and of the works that they return. DDP waits in C++, at the end of its backward pass. It measures that itself, for every
hundredth iteration; we ask it to measure each one, and read the result when the next forward pass begins. Both are
methods of classes of torch, which are wrapped at the end of the first step: neither the order of calls in the script
nor the objects that it has created matter, and no result changes.

On accelerators, a wait ends before the collective does, and measuring it would slow training down. So only groups that
communicate by gloo, in a process that uses no accelerator, are measured. Anything else, and any failure, leaves the
value unset.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType

log = logging.getLogger(__name__)

EVERY_ITERATION, TORCHS_RATE = 1, 100
"""Iterations from one measurement of DDP to the next: ours, and torch's default after the first ten."""
_BACKENDS = {"gloo"}
"""Their collectives on the CPU block until the result is complete."""
_ACCELERATORS = ("cuda", "xpu")


class Meter(Protocol):
    """What the waits are added to."""

    def during(self, wait: Any) -> AbstractContextManager[None]: ...
    def add(self, wait: Any, seconds: float) -> None: ...


class Pass(NamedTuple):
    """A backward pass of DDP."""

    end_ns: int
    """When its wait ended, by the wall clock that DDP reads."""
    seen_s: float
    """When the next forward pass began, by the monotonic clock."""


class CollectiveWaits:
    """The waits of one process. At most one object measures at a time."""

    def __init__(
        self,
        meter: Meter,
        modules: Mapping[str, ModuleType] = sys.modules,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._modules = modules
        self._now_s = now_s
        self._thread = 0
        self._why_unknown = "no step has ended"
        self._has_group = False
        self._last: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        """By the logger of a DDP module."""
        self._reducers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of DDP modules that measure each iteration."""

    def begin(self) -> None:
        """Measure from now on. Called by the training thread, which is the only one whose waits count."""
        if _measuring.waits is not None:
            self._why_unknown = "another context of this process measures"
            return
        self._thread = get_ident()
        self._why_unknown = ""
        try:
            if not self._is_measurable():
                return
            _wrap(self._modules["torch"])
        except Exception as error:  # noqa: BLE001 - of torch: a version without one of these names
            self.give_up(f"torch cannot be measured: {error!r}")
            _unwrap()
            return
        _measuring.waits = self

    def close(self) -> None:
        """Measure no longer, and leave torch as it was."""
        if _measuring.waits is self:
            _measuring.waits = None
            _unwrap()
            self._reset_rates()

    def is_known(self) -> bool:
        """Return whether all waits are measured, or were until the end. Another thread calls it about once a second."""
        if _measuring.waits is not self:
            return self._has_group and not self._why_unknown
        try:
            return self._is_measurable() and self._has_group
        except Exception as error:  # noqa: BLE001 - of torch: private names, and a group that is just being created
            log.debug("waits in collectives are not known for now: %s", error)
            return False

    def give_up(self, why: str) -> None:
        """Leave the value unset from now on."""
        if not self._why_unknown:
            log.debug("waits in collectives are not measured: %s", why)
            self._why_unknown = why
            self._reset_rates()

    # -- the training thread ---------------------------------------------------------------------------------------

    def is_of_training(self) -> bool:
        """Return whether this is the training thread; waits of others, such as lanes, do not stop training."""
        return get_ident() == self._thread and not self._why_unknown

    def waiting(self) -> AbstractContextManager[None]:
        return self._meter.during("collective_s")

    def forward_begins(self, logger: Any) -> None:
        """Count the wait of the last backward pass of a DDP module."""
        if self._why_unknown:
            return
        if get_ident() != self._thread:
            self.give_up("DDP runs in another thread than the one that reports steps")
            return
        try:
            times = logger._get_ddp_logging_data().ints_map  # torch has no public name for it
            last, now_s = self._last.get(logger), self._now_s()
            is_first = not times["iteration"]  # nothing is measured before it
            self._last[logger] = Pass(0 if is_first else times["backward_comm_time_end"], now_s)
            if last is not None and not is_first:  # the first pass that is seen belongs to the time before
                self._meter.add("collective_s", exposed_s(times, last, now_s))
        except Exception as error:  # noqa: BLE001 - of torch: private names
            self.give_up(f"cannot read the times of DDP: {error!r}")

    def iteration_begins(self, reducer: Any) -> None:
        """Let DDP measure each iteration."""
        if self._why_unknown or reducer in self._reducers:
            return
        try:
            reducer._set_ddp_runtime_logging_sample_rate(EVERY_ITERATION)  # torch has no public name for it
            self._reducers.add(reducer)
        except Exception as error:  # noqa: BLE001 - of torch: private names
            self.give_up(f"cannot measure every iteration of DDP: {error!r}")

    def _reset_rates(self) -> None:
        with contextlib.suppress(Exception):  # of torch: private names
            for reducer in tuple(self._reducers):
                reducer._set_ddp_runtime_logging_sample_rate(TORCHS_RATE)
        self._reducers.clear()

    # -- what can be measured --------------------------------------------------------------------------------------

    def _is_measurable(self) -> bool:
        if not self._why_unknown:
            why = unmeasurable(self._modules)
            if why:
                self.give_up(why)
            else:
                self._has_group = self._has_group or bool(_backends(self._modules))
        return not self._why_unknown


def exposed_s(times: Mapping[str, int], last: Pass, now_s: float) -> float:
    """Return how long the last backward pass of DDP waited after its computing had ended; 0 if it was counted before.

    DDP reads the wall clock, which may be set: a wait is never longer than the time since the previous forward pass.
    """
    computed_ns, end_ns = times["backward_compute_time_end"], times["backward_comm_time_end"]
    if not computed_ns or end_ns == last.end_ns:
        return 0.0
    return min(max(end_ns - computed_ns, 0) / 1e9, now_s - last.seen_s)


def unmeasurable(modules: Mapping[str, ModuleType]) -> str:
    """Return why the collectives of this process cannot be measured; empty if they can."""
    torch: Any = modules.get("torch")
    distributed: Any = modules.get("torch.distributed")
    if torch is None or distributed is None or not distributed.is_available():
        return "torch.distributed is not imported"
    used = [name for name in _ACCELERATORS if hasattr(torch, name) and getattr(torch, name).is_initialized()]
    if used:
        return f"{used[0]} is in use"
    if distributed.get_debug_level() == distributed.DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL would log every measurement"
    config: Any = modules.get("torch._dynamo.config")
    if getattr(config, "optimize_ddp", None) == "python_reducer":
        return "DDP communicates by compiled code"
    others = [each for each in _backends(modules) if each not in _BACKENDS]
    return f"a group communicates by {others[0] or 'no backend of the CPU'}" if others else ""


def _backends(modules: Mapping[str, ModuleType]) -> list[str]:
    """Return the backend of each process group for tensors of the CPU."""
    world: Any = modules["torch.distributed.distributed_c10d"]._world  # torch has no public list
    return [backend_of_cpu(str(config)) for config in tuple(world.pg_backend_config.values())]


def backend_of_cpu(config: str) -> str:
    """Return the backend for the CPU in torch's notation `cpu:gloo,cuda:nccl`; empty if there is none."""
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return backends.get("cpu", "")


# -- the wrappers ------------------------------------------------------------------------------------------------------


class _Measuring:
    """What the wrappers look up: classes of torch belong to the whole process."""

    waits: CollectiveWaits | None = None
    originals: list[tuple[Any, str, Any, Any]]
    """Owner and name of what was wrapped, the original and the wrapper."""

    def __init__(self) -> None:
        self.originals = []


_measuring = _Measuring()


def _wrap(torch: Any) -> None:
    distributed: Any = torch.distributed
    private: Any = distributed.distributed_c10d
    hide = _hidden_from_compiler(torch)
    reducer, logger = distributed.Reducer, distributed.Logger
    _replace(private.Work, "wait", _timed, hide)
    _replace(distributed.ProcessGroup, "monitored_barrier", _timed, hide)
    _replace(distributed, "_broadcast_coalesced", _timed, hide)  # of DDP: buffers, before a forward pass
    _replace(logger, "set_runtime_stats_and_log", _read_after, hide)
    _replace(reducer, "prepare_for_forward", _rated, hide)


def _hidden_from_compiler(torch: Any) -> Callable[[Any], None]:
    """Return what makes torch's compiler treat a function, and what that calls, like the C function that it replaces.

    `torch.compiler.disable` would do so, too, but imports the compiler, which takes seconds.
    """
    compiler: Any = torch._C._dynamo.eval_frame  # torch has no public name for it
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)

    def hide(function: Any) -> None:
        function._torchdynamo_disable = True  # what `torch.compiler.disable` sets
        compiler.set_code_exec_strategy(function.__code__, skip)

    return hide


def _replace(owner: Any, name: str, wrapper_of: Callable[[Any], Any], hide: Callable[[Any], None]) -> None:
    wrapper = wrapper_of(getattr(owner, name))
    wrapper.__name__ = name
    hide(wrapper)
    _measuring.originals.append((owner, name, vars(owner).get(name), wrapper))
    setattr(owner, name, wrapper)


def _unwrap() -> None:
    """Put the originals back. A wrapper that something else has wrapped since stays and only passes calls on."""
    while _measuring.originals:
        owner, name, original, wrapper = _measuring.originals.pop()
        if vars(owner).get(name) is not wrapper:
            continue
        if original is None:
            delattr(owner, name)  # inherited
        else:
            setattr(owner, name, original)


def _timed(original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        waits = _measuring.waits
        if waits is None or not waits.is_of_training():
            return original(*args, **kwargs)
        with waits.waiting():
            return original(*args, **kwargs)

    return call


def _read_after(original: Any) -> Any:
    def call(logger: Any) -> Any:
        result = original(logger)
        waits = _measuring.waits
        if waits is not None:
            waits.forward_begins(logger)
        return result

    return call


def _rated(original: Any) -> Any:
    def call(reducer: Any) -> Any:
        waits = _measuring.waits
        if waits is not None:
            waits.iteration_begins(reducer)
        return original(reducer)

    return call
