"""What a run stored, computed, summed and stepped in which dtype: a table, and a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ampdbg.formats import FLOAT32, FORMATS
from ampdbg.quantities import listed
from ampdbg.record.run import KindDtypes, Record

from . import view

PLACES: Mapping[str, str] = {
    "stored": "stored",
    "computed": "computed",
    "gradients": "gradients",
    "accumulated": "summed",
    "reduced": "reduced",
    "states": "states",
    "masters": "masters",
    "averages": "averages",
}
"""The columns by the fields of :class:`KindDtypes`, those left out in which nothing stands."""


def short_of(dtype: str) -> str:
    """A dtype as it is called in short, where it has a short name."""
    return FORMATS[dtype].short if dtype in FORMATS else dtype


def contract(record: Record) -> view.Table:
    """A row for each kind of parameter, and below them what was asked for; nothing of FP32 weights."""
    kinds = record.dtypes * has_half_weights(record)
    rows = dict.fromkeys((one.kind, *("/".join(_names(one, field)) for field in PLACES)) for one in kinds)
    used = [0, *(at for at, _ in enumerate(PLACES, 1) if any(row[at] for row in rows))]
    headings = ("kind", *PLACES.values())
    columns = tuple(view.Column(headings[at]) for at in used)
    wanted = listed([f"{who} {short_of(what)}" for who, what in record.asked.items()], 9)
    asked = (view.line(f"Asked for: {wanted}"),) * bool(rows and record.asked)
    return view.Table("Dtypes of weights", columns, tuple(tuple(row[at] for at in used) for row in rows), below=asked)


def weights_in_brief(record: Record, typed: view.Typed) -> Iterator[str]:
    """All kinds of parameter in one line; of FP32 weights where all was asked for."""
    alike: dict[str, list[str]] = {}
    for field, heading in PLACES.items():
        names = sorted({name for one in record.dtypes for name in _names(one, field)})
        alike.setdefault("/".join(names), []).append(heading)
    is_half = has_half_weights(record)
    masterless = ["no FP32 masters"] * ("masters" in alike.pop("", []) and is_half)
    if is_half or (typed.verbose and alike):
        yield "Weights: " + "; ".join([*(f"{listed(of_it, 9)} {names}" for names, of_it in alike.items()), *masterless])


def has_half_weights(record: Record) -> bool:
    """An optimizer trains weights that are stored in half."""
    return any(name in FORMATS and name != FLOAT32.name for one in record.dtypes for name in one.stored)


def _names(one: KindDtypes, field: str) -> list[str]:
    """What stands in a column; that gradients are added up in their own dtype goes without saying."""
    names = getattr(one, field)
    return [] if field == "accumulated" and names == one.gradients else list(map(short_of, names))
