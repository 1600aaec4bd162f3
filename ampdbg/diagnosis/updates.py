"""Findings about the updates of half parameters, from the ledger that compares them with float32 masters. The
movement of a weight is the sum of its updates over a window of steps. Rounding can remove a part or everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ampdbg.diagnosis.decisions import Decision, Evident, fact
from ampdbg.formats import FORMATS, HALF_NAMES
from ampdbg.quantities import counted, listed, multiple, number
from ampdbg.record.codes import CODES, catalogued
from ampdbg.record.run import FrozenParameter, KeptAverage, Record, StillParameter, StuckMoment, Updates

SMALL_UPDATES, FROZEN = "optimizer-underflow", "frozen-weights"
STUCK, ACCUMULATION, AVERAGE = "stuck-moment", "lost-accumulation", "frozen-average"

PARAMETERS = "parameters"
"""Evidence key for names of parameters. The finding names the first."""

TOO_FAR = 4.0
"""Updates this many times as large as float32's are not explained by rounding."""

MOST_OF_THE_UPDATE = 0.5
"""If half weights lose a larger share of the movement, training does not advance."""

COSTLY, A_QUARTER = 0.1, 0.25
"""Losing a quarter of the movement matters if this share of the loss's fall is lost with it."""

STANDS_STILL = 0.9
"""An average that loses a larger share of its movement is frozen."""

A_PART = 0.1
"""A weight decay with a smaller share of the updates' energy has no visible effect within a few steps."""

LOST_OF_A_SUM = 0.1
"""A gradient sum with a larger relative distance from float32's sum has lost a part."""


@dataclass(frozen=True, eq=False)
class HalfUpdates(Evident):
    """The ledger of a run's half parameters."""

    record: Record
    seen: Updates

    @property
    def lost(self) -> float:
        """The share of the float32 movement that half weights do not make."""
        return self.seen.lost or 0.0

    @property
    def is_lost_by_gradients(self) -> bool:
        """True if most of the movement that comes from gradients is lost."""
        return (self.seen.lost_gradient or 0.0) > MOST_OF_THE_UPDATE

    @property
    def is_lost(self) -> bool:
        """True if most movement is lost, or a part that costs much, although no parameter is frozen. Weight decay
        counts only if it is large enough."""
        counts = self.is_lost_by_gradients or self.seen.decay >= A_PART
        is_costly = self.lost > A_QUARTER and (self.seen.cost or 0.0) > COSTLY
        return not self.seen.frozen and ((self.lost > MOST_OF_THE_UPDATE and counts) or is_costly)

    @cached_property
    def stillest(self) -> list[FrozenParameter]:
        """The frozen parameters, those without any movement first."""
        return sorted(self.seen.frozen, key=lambda one: (one.moved > 0, -one.lost))

    @cached_property
    def moments(self) -> list[StuckMoment]:
        """The stuck second moments, largest distance from float32 first."""
        return sorted(self.seen.stuck, key=lambda one: -one.times)

    @property
    def judged_share(self) -> str:
        """How many half parameters were judged; "" for all."""
        of_all = f"{self.seen.judged} of {counted(self.seen.half, 'half parameter')}"
        return of_all if self.seen.unjudged else ""

    @property
    def of_which_half(self) -> str:
        return self.judged_share or "half weights"

    @cached_property
    def unmoved(self) -> list[StillParameter]:
        """The frozen parameters of optimizers that cannot be compared, unless those optimizers step masters."""
        with_masters = {one.kind for one in self.record.dtypes if one.masters}
        return [one for one in self.seen.still if one.kind not in with_masters]

    @property
    def unmoved_values(self) -> str:
        """How many values of ``unmoved`` have moved, and the kinds of the parameters."""
        of_kinds = Counter(one.kind for one in self.unmoved)
        values = sum(one.entries for one in self.unmoved)
        kinds = listed(f"{kind} ({count:,})" for kind, count in of_kinds.items())
        return f"{sum(one.moved for one in self.unmoved):,} of {counted(values, 'value')} of {kinds}"

    @property
    def unmoved_steps(self) -> int:
        return min(one.steps for one in self.unmoved)

    @property
    def worst(self) -> StuckMoment:
        return self.moments[0]

    @cached_property
    def averages(self) -> list[KeptAverage]:
        """The frozen averages, most steps first."""
        still = (one for one in self.seen.averages if one.lost > STANDS_STILL)
        return sorted(still, key=lambda one: -one.steps)

    @property
    def slowest(self) -> KeptAverage:
        """The average with the largest decay, preferably a frozen one."""
        return max(self.averages or self.seen.averages, key=lambda one: one.decay)

    @cached_property
    def losing(self) -> list[KeptAverage]:
        """The averages that lose most of their movement but are not frozen, worst first."""
        found = [one for one in self.seen.averages if MOST_OF_THE_UPDATE < one.lost <= STANDS_STILL]
        return sorted(found, key=lambda one: -one.lost)

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the step and the row's first parameter. Frozen parameters are at the first step."""
        names = fact(self, row.evidence[PARAMETERS]) if PARAMETERS in row.evidence else ()
        at = self.seen.spoilt_step if row in SPOILING else self.record.steps[-1 if row.code == STUCK else 0].step
        return {"step": at, "phase": "optimizer", "parameter": next(iter(names), "")}

    # Text of messages

    @property
    def still(self) -> list[str]:
        return [f"{one.name} ({one.moved} of {counted(one.entries, 'value')})" for one in self.stillest]

    @property
    def still_averages(self) -> list[str]:
        of = "that of {0.name} ({0.moved} of the {0.entries:,} values that move in float32)"
        return [of.format(one) for one in self.averages]

    @property
    def losing_averages(self) -> list[str]:
        return [f"{one.name} ({one.lost:.0%})" for one in self.losing]

    @property
    def lost_of_averages(self) -> float:
        """The share of the float32 movement that all half averages together do not make."""
        return sum(one.lost * one.way for one in self.seen.averages) / sum(one.way for one in self.seen.averages)

    @property
    def about_decay(self) -> str:
        """How the decay of the slowest average changed; if it did not, how far an average can be from its weight while
        no step moves it. Half a unit in the last place is at least 2**-(precision + 1) of a value."""
        first, last = self.slowest.first_decay, self.slowest.decay
        if first not in (None, last):
            return f"The decay went from {first:.7g} to {last:.7g}"
        distance = multiple(2.0 ** -(FORMATS[self.slowest.dtype].precision + 1) / (1.0 - last), 1.0)
        return f"At a decay of {last:g} only values that differ from their weight by over {distance} their size move"

    @property
    def of_kinds(self) -> str:
        """The lost share of the frozen parameters, of the kinds that lose most of their movement, and of all."""
        shares = [one.lost for one in self.seen.frozen]
        ends = dict.fromkeys(f"{end(shares):.0%}" for end in (min, max)) if shares else {}
        frozen = [f"{' to '.join(ends)} in these parameters"] if ends else []
        kinds = (one for one in self.seen.kinds if (one.lost or 0) > MOST_OF_THE_UPDATE)
        judged = f"the {self.judged_share} that could be judged" if self.judged_share else "all half weights together"
        return listed([*frozen, *(f"{one.lost:.0%} in {one.kind}" for one in kinds), f"{self.lost:.0%} in {judged}"], 9)

    @property
    def parts(self) -> str:
        """The lost shares of the gradients' part and of the weight decay."""
        parts = {"gradient's part": self.seen.lost_gradient, "weight decay": self.seen.lost_decay}
        return listed([f"{value:.0%} of the {what}" for what, value in parts.items() if value is not None])

    @property
    def what_is_small(self) -> str:
        """The lost part of the updates, in words."""
        if self.lost <= MOST_OF_THE_UPDATE:
            return "updates are often"
        return "updates are mostly" if self.is_lost_by_gradients else "weight decay is mostly"

    @property
    def forecast(self) -> str:
        """The learning rates below which rounding removes the mean update of most entries, by kind of parameter.
        They assume unchanged gradients. With momentum, the gradients of norms differ much at another learning rate."""
        known = [(one.freezes_below, one.kind) for one in self.seen.kinds if one.freezes_below is not None]
        return listed((f"{number(rate)} ({kind})" for rate, kind in sorted(known, key=lambda one: -one[0])), 5)

    @property
    def apart(self) -> str:
        """The distance of the worst second moment and its updates from float32's."""
        sizes, times = ("small", "large"), self.worst.times
        moments, updates = sizes[self.worst.is_too_large], sizes[not self.worst.is_too_large]
        return f"at least {times:.3g} times too {moments}, and the updates {times**0.5:.2g} times too {updates}"

    @property
    def taken_off(self) -> float:
        """The share that a step removes from the worst second moment."""
        return 1.0 - self.worst.beta


LOST = {"lost": "seen.lost", "lost_gradient": "seen.lost_gradient", "lost_decay": "seen.lost_decay"}

SPOILING: tuple[Decision[HalfUpdates], ...] = (
    Decision(
        SMALL_UPDATES,
        "an update makes half weights inf or NaN, while all gradients and the same update in FP32 are finite",
        lambda it: bool(it.seen.spoilt),
        "the update of step {seen.spoilt_step:d} makes {seen.spoilt} non-finite; all gradients, and the same "
        "update in FP32, are finite[: eps={seen.vanishing_eps:g} is 0 in half]",
        {PARAMETERS: "seen.spoilt", "eps": "seen.vanishing_eps"},
    ),
)

FORECAST = "[. With such gradients most values stay still at learning rates below {forecast}]"

STILL_AVERAGES = (
    "{averages:half average} hardly moved in {slowest.steps:step}: {still_averages}. In all, "
    "{seen.averages:half average} lost {lost_of_averages:.0%} of the movement in float32. {about_decay}"
)
OF_AVERAGES = {
    PARAMETERS: "averages.name",
    "decay": "slowest.decay",
    "steps": "slowest.steps",
    "lost": "lost_of_averages",
}

SMALL: tuple[Decision[HalfUpdates], ...] = (
    Decision(
        SMALL_UPDATES,
        "the updates of half weights go over 4 times as far as float32's, with the same gradients",
        lambda it: it.seen.times > TOO_FAR,
        "in {seen.steps:sampled step} the updates of {of_which_half} go {seen.times:.3g} times as far as float32's "
        "with the same gradients, because small second moments round to zero in half"
        "[: eps={seen.vanishing_eps:g} is 0 in half]",
        {"times": "seen.times", "eps": "seen.vanishing_eps"},
    ),
    Decision(
        FROZEN,
        "a parameter loses over 90 % of its way, which costs over 0.02 % of what half weights gain",
        lambda it: bool(it.seen.frozen),
        "{stillest:half parameter} hardly moved in {seen.steps:sampled step}: {still}. Rounding loses this much of "
        "the movement of float32 weights: {of_kinds}"
        "[. By a first-order estimate that costs {seen.cost:percent} of the loss's fall, and in these parameters "
        "{seen.cost_of_still:percent}]" + FORECAST,
        {PARAMETERS: "stillest.name", **LOST},
    ),
    Decision(
        FROZEN,
        "of a parameter whose updates cannot be compared hardly a value has changed in 32 steps or more, though they "
        "have gradients, and their steps should add up to more than a unit in the last place",
        lambda it: bool(it.unmoved),
        "{unmoved_values} have changed in {unmoved_steps:step}: {unmoved.name}. Their gradients are not zero. Their "
        "steps should add up to more than a unit in the last place. What others lose is not known: ampdbg cannot "
        "compare this optimizer's updates with float32's",
        {PARAMETERS: "unmoved.name", "steps": "unmoved_steps"},
        severity="warning",
    ),
    Decision(
        SMALL_UPDATES,
        "every parameter moves, but over half of the masters' way is lost, by gradients or by weight decay; or over a "
        "quarter, which costs over 10 % of what half weights gain",
        lambda it: it.is_lost,
        "in {seen.steps:sampled step} rounding loses this much of the movement of float32 weights: {of_kinds}; it is "
        "{parts}, for the {what_is_small} below half a unit in the last place of the weights"
        "[. By a first-order estimate that costs {seen.cost:percent} of the loss's fall]" + FORECAST,
        LOST,
        severity="warning",
    ),
    Decision(
        AVERAGE,
        "an average kept in half loses over 90 % of its way in float32; all together lose over half",
        lambda it: bool(it.averages) and it.lost_of_averages > MOST_OF_THE_UPDATE,
        STILL_AVERAGES,
        OF_AVERAGES,
    ),
    Decision(
        AVERAGE,
        "an average kept in half loses over 90 % of its way in float32; all together lose less than half",
        lambda it: bool(it.averages) and it.lost_of_averages <= MOST_OF_THE_UPDATE,
        STILL_AVERAGES,
        OF_AVERAGES,
        severity="warning",
    ),
    Decision(
        AVERAGE,
        "every average kept in half moves, but all together lose over half of their way in float32",
        lambda it: not it.averages and bool(it.losing) and it.lost_of_averages > MOST_OF_THE_UPDATE,
        "in {slowest.steps:step} {seen.averages:half average} lost {lost_of_averages:.0%} of the movement in float32, "
        "most of that in {losing_averages}. {about_decay}",
        {**OF_AVERAGES, PARAMETERS: "losing.name"},
        severity="warning",
    ),
    Decision(
        STUCK,
        "a second moment in half cannot decay at its beta2, and differs from float32's by over 4 times",
        lambda it: bool(it.moments),
        "the second moments of {moments.parameter} are stuck: with beta2 = {worst.beta:g} a step takes {taken_off:.1%} "
        "off, which rounds back; after {worst.steps:step} they are {apart}",
        {PARAMETERS: "moments.parameter", "times": "worst.times", "beta2": "worst.beta"},
        severity="warning",
    ),
)

SUMS: tuple[Decision[HalfUpdates], ...] = (
    Decision(
        ACCUMULATION,
        "the sum of 16 gradients or more is over a tenth from float32's",
        lambda it: (it.seen.lost_accumulation or 0.0) > LOST_OF_A_SUM,
        "the sum of {seen.passes:d} gradients in half is {seen.lost_accumulation:.0%} from float32's: half does "
        "not add a gradient below half a unit in the sum's last place",
        {"lost": "seen.lost_accumulation", "passes": "seen.passes"},
        severity="warning",
    ),
)


def why_no_edit(record: Record) -> str:
    """Return why editing the weights cannot cure the run, or "" if it may. It cannot if only averages lose
    precision, and the optimizer steps float32 weights or float32 copies."""
    codes = {finding.code for finding in record.faults if catalogued(finding.code).verdict == "precision"}
    has_half = any(HALF_NAMES & {*one.stored} and not one.masters for one in record.dtypes)
    is_of_averages = codes == {AVERAGE} and bool(record.dtypes) and not has_half
    return f"its averages alone lose by half, and its weights do not; {CODES[AVERAGE].remedy}" * is_of_averages


def half_updates(record: Record) -> Iterator[HalfUpdates]:
    """Yield the ledger of the record as the only subject."""
    yield HalfUpdates(record, record.ledger)
