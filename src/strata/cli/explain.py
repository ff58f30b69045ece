"""`strata coordinator --explain`: which timeout follows from which."""

from typing import TYPE_CHECKING

from rich.table import Table

from strata.terminal import Console, echo_json

if TYPE_CHECKING:
    from strata.coordinator.config import CoordinatorConfig


def explain(config: "CoordinatorConfig", *, as_json: bool) -> None:
    from strata.coordinator import timeouts  # noqa: PLC0415

    if as_json:
        echo_json(timeouts.explained(config))
        return
    console = Console(highlight=False)
    chain = Table(title="The chain of timeouts", title_justify="left", show_lines=True)
    for heading in ("link", "seconds", "set by", "means", "stands there because"):
        chain.add_column(heading, justify="right" if heading == "seconds" else "left")
    for link in timeouts.chain(config):
        chain.add_row(link.name, f"{link.seconds:g}", link.setting or "(follows)", link.means, link.follows)
    console.print(chain)
    deaths = Table(title="How long a death goes unnoticed at the most", title_justify="left")
    for heading in ("death", "seconds", "that is"):
        deaths.add_column(heading, justify="right" if heading == "seconds" else "left")
    for found in timeouts.detections(config):
        deaths.add_row(found.death, "never" if found.within_s is None else f"{found.within_s:g}", found.sum_of)
    console.print(deaths)
