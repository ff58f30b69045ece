"""Lanes run communication beside the backward pass, one bucket after the other.

A DDP hook must return a future at once, so that the backward pass continues. An algorithm of several stages starts a
collective when the previous one has ended, and all ranks must start the collectives of a process group in the same
order. Callbacks of futures do not keep that order with gloo, whose threads finish buckets in any order. A lane does: it
takes the buckets in the order in which DDP hands them over, which is the same on all ranks.

On the CPU, a lane is a thread. On accelerators it is a stream, where collectives only enqueue work.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Future: TypeAlias = torch.futures.Future[Tensor]
    _Order: TypeAlias = tuple[Callable[[], None], Tensor, torch.futures.Future[Any]]


class Lane(Protocol):
    """Runs work in order of submission."""

    def submit(self, work: Callable[[], None], result: Tensor) -> Future:
        """Return a future that yields `result` after `work`, or raises its error."""
        ...


def make_lane(device: torch.device) -> Lane:
    return ThreadLane() if device.type == "cpu" else StreamLane(device)


class ThreadLane:
    """A thread that ends with this object. It is a daemon, so that Python's exit does not wait for it."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._orders,), daemon=True, name="strata-all-reduce").start()
        weakref.finalize(self, self._orders.put, None)

    def submit(self, work: Callable[[], None], result: Tensor) -> Future:
        done: torch.futures.Future[Any] = torch.futures.Future()
        self._orders.put((work, result, done))
        return done.then(_value_or_raise)


def _serve(orders: queue.SimpleQueue[_Order | None]) -> None:
    while (order := orders.get()) is not None:
        work, result, done = order
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the training thread raises it
            done.set_result(error)
        else:
            done.set_result(result)
        del order, work, result, done  # the thread must not keep a bucket alive while it waits


def _value_or_raise(done: torch.futures.Future[Any]) -> Tensor:
    """Return the result. DDP only notices an error that a callback raises, not one that `set_exception` stores."""
    value: Tensor | Exception = done.value()
    if isinstance(value, Exception):
        raise value
    return value


class StreamLane:
    """A stream of a device. Work is enqueued by the caller and does not block it."""

    def __init__(self, device: torch.device) -> None:
        self._devices: list[int | str | torch.device] | None = None if device.type == "cpu" else [device]
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()

    def submit(self, work: Callable[[], None], result: Tensor) -> Future:
        self._stream.wait_stream(self._module.current_stream())
        done: Future = torch.futures.Future(devices=self._devices)
        with self._module.stream(self._stream):
            work()
            done.set_result(result)  # records the stream, so that the caller's stream waits for it
        return done
