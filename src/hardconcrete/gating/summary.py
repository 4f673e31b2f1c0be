"""A table of the groups of a gated model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardconcrete.gating.gated_model import GatedModel


def print_summary(gated: "GatedModel") -> None:
    """Print units, weights per unit, and how open they are, then the costs."""
    from rich.console import Console
    from rich.table import Table

    table = Table("group", "units", "weights each", "open now", "mean P(open)")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = zip(gated.groups, gated.units_left(), gated.open_probability().values(), strict=True)
    for group, units_open, probability in rows:
        numbers = (group.units, group.size, units_open, f"{probability.mean().item():.3f}")
        table.add_row(group.name, *map(str, numbers))
    console = Console()
    console.print(table)
    for name, site in gated.overruled.items():
        console.print(f"{name}: the site {site} is gated instead")
    for line in str(gated.costs).splitlines():
        console.print(line)
