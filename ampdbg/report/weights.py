"""Weights on a page: the dtypes in which they were stored, computed and stepped, and the updates that half loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from ampdbg.formats import FORMATS
from ampdbg.quantities import counted, listed, number, percent, share
from ampdbg.record.run import KeptAverage, KindDtypes, Record, Updates

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
"""The columns by the fields of :class:`KindDtypes`; empty columns are left out."""


def short_of(dtype: str) -> str:
    """Return the short name of a dtype, if it has one."""
    return FORMATS[dtype].short if dtype in FORMATS else dtype


def contract(record: Record) -> view.Table:
    """Return a row for each kind of parameter, and the requested dtypes below; no rows for FP32 weights."""
    kinds = record.dtypes * bool(record.half_weights)
    rows = dict.fromkeys((one.kind, *("/".join(_names(one, field)) for field in PLACES)) for one in kinds)
    columns = [view.Column(heading) for heading in ("kind", *PLACES.values())]
    wanted = listed([f"{who} {short_of(what)}" for who, what in record.asked.items()], 9)
    asked = (view.line(f"Asked for: {wanted}"),) * bool(rows and record.asked)
    return view.table("Dtypes of weights", columns, list(rows), *asked)


def weights_in_brief(record: Record, typed: view.CommandContext) -> Iterator[str]:
    """Yield all kinds of parameter in one line; of FP32 weights only if ``verbose``."""
    alike: dict[str, list[str]] = {}
    for field, heading in PLACES.items():
        names = sorted({name for one in record.dtypes for name in _names(one, field)})
        alike.setdefault("/".join(names), []).append(heading)
    masterless = ["no FP32 masters found"] * ("masters" in alike.pop("", []) and bool(record.half_weights))
    if record.half_weights or (typed.verbose and alike):
        yield "Weights: " + "; ".join([*(f"{listed(of_it, 9)} {names}" for names, of_it in alike.items()), *masterless])


def _names(one: KindDtypes, field: str) -> list[str]:
    """Return the dtypes in a column; gradients accumulated in their own dtype are left out."""
    names = getattr(one, field)
    return [] if field == "accumulated" and names == one.gradients else list(map(short_of, names))


COLUMNS: Mapping[str, tuple[str, Literal["share", "number"], Callable[[float], str]]] = {
    "lost": ("lost", "share", share),
    "lost_gradient": ("of gradient", "share", share),
    "lost_decay": ("of decay", "share", share),
    "unmoved": ("still a step", "share", share),
    "freezes_below": ("still below lr", "number", number),
}
"""The columns about a kind of weights, by the fields of :class:`KindUpdates`."""

MEASURED = "Measured in these steps alone: others may lose more or less."

SUM = "The sum of the gradients of {} in half is {} from what it is in float32."


OF_AVERAGES = "The share of the way of averages in float32 that those in half do not go."


def ledger(updates: Updates) -> view.Table:
    """Return a row for each kind of parameter that was measured."""
    columns = [view.Column("kind"), *(view.Column(head, kind) for head, kind, _ in COLUMNS.values())]
    rows = []
    for one in updates.kinds:
        values = [(getattr(one, field), words) for field, (_, _, words) in COLUMNS.items()]
        rows.append((one.kind, *("" if value is None else words(value) for value, words in values)))
    title = f"Half weights, in {counted(updates.steps, 'sampled step')}"
    off, passes = updates.lost_accumulation, counted(updates.passes, "backward pass")
    below = [MEASURED] * bool(updates.kinds) + [SUM.format(passes, percent(off or 0.0))] * (off is not None)
    return view.table(title, columns, rows, *map(view.line, below))


def averages(updates: Updates) -> view.Table:
    """Return the share of their movement that averages kept in half lose, by kind of parameter."""
    of_kinds: dict[str, list[KeptAverage]] = {}
    for one in updates.averages:
        of_kinds.setdefault(one.kind, []).append(one)
    rows = tuple(
        (kind, share(sum(one.lost * one.way for one in of_it), sum(one.way for one in of_it)))
        for kind, of_it in of_kinds.items()
    )
    columns = (view.Column("kind"), view.Column("lost", "share"))
    return view.Table("Averages in half", columns, rows, below=(view.line(OF_AVERAGES),) * bool(rows))
