"""Which run `strata status` and `strata events` speak of when nobody says it: the one that is under way here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.terminal import echo

if TYPE_CHECKING:
    from strata.launch.record.directory import RunDirectory


def chosen_run(name: str | None, *, is_elsewhere: bool) -> RunDirectory | None:
    """The run of this name; without a name, the only one under way on this machine. None if there is none, or the user
    has said where to look instead.

    Raises:
        ConfigError: There is no such run, or several are under way; or both a run and another place are given.
    """
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import MAX_NAMED, UNDER_WAY, all_runs, open_run, state_now  # noqa: PLC0415

    if name is not None:
        if is_elsewhere:
            raise ConfigError(f"run {name} and an address are two places to look at; give one of them", field="run")
        return open_run(name)
    if is_elsewhere:
        return None
    live = [run for run in all_runs().found if state_now(run.status) in UNDER_WAY]
    if len(live) > 1:
        listed = ", ".join(run.name for run in live[:MAX_NAMED])
        raise ConfigError(f"{len(live)} runs are under way here; name one of them: {listed}", field="run")
    if live:
        echo(f"run {live[0].name}", err=True, bold=True)
    return live[0] if live else None
