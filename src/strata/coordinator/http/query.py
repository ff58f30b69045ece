"""How the HTTP side reads the state: through the engine, so that it tells nothing that is not durable."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from strata.errors import CoordinatorUnavailable, JournalWriteFailed, StrataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.clock import Moment
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.state.core import Core

T = TypeVar("T")
ASK_TIMEOUT_S = 10.0
NUM_ATTEMPTS = 2
"""A read that was caught in a batch that failed sees the state before it at the second attempt."""

log = logging.getLogger(__name__)


async def ask(engine: Engine, read: Callable[[Core, Moment], T]) -> T:
    """What `read` says of the state, once everything that it saw is durable."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        answer = await _asked(engine, read)
        if isinstance(answer, JournalWriteFailed) and attempt < NUM_ATTEMPTS:
            continue
        if isinstance(answer, StrataError):
            raise answer
        return answer
    raise AssertionError("unreachable")


async def _asked(engine: Engine, read: Callable[[Core, Moment], T]) -> T | StrataError:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(answer: Any) -> None:
        if not answered.done():  # we may have given up
            answered.set_result(answer)

    def looked(core: Core, at: Moment) -> T | StrataError:
        try:
            return read(core, at)
        except StrataError as error:
            return error
        except Exception as error:
            # It runs among the calls of others, who must not suffer from it.
            log.exception("a read over HTTP failed in a way that was not foreseen")
            return StrataError(f"the coordinator failed on this request ({type(error).__name__}); its log says where")

    engine.call(lambda core, at: lambda: looked(core, at), done)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await answered  # type: ignore[no-any-return]
    except TimeoutError:
        return CoordinatorUnavailable(f"the journal did not answer within {ASK_TIMEOUT_S} s; try again")
