"""Tests of the order of calls as a pure state machine: sequences of calls, and their codes."""

import pytest

from ampdbg.call_order import Call, CallOrder, Hit
from ampdbg.probes.torch_errors import misuse_of_refusal

SCALED = Call("backward", optimizers=(0,), actor=1)
FRESH = Call("backward", optimizers=(0,), actor=1, rewritten=(0, 1))
ADDED = Call("backward", optimizers=(0,), actor=1, added=(0,))
UNSCALED = Call("backward", optimizers=(0,), rewritten=(0, 1))
PLAIN = UNSCALED._replace(is_plain=True)
CLIP = Call("clip", optimizers=(0,))
UNSCALE = Call("unscale", optimizers=(0,))
STEP = Call("step", optimizers=(0,))
SKIP = Call("step", optimizers=(0,), skipped=True)
BARE = Call("bare step", optimizers=(0,))
DIVIDED = BARE._replace(rewritten=(0,))
UPDATE = Call("update", actor=1)
OTHER_UPDATE = Call("update", actor=2)
GET_SCALE = Call("get_scale")
MOVE = Call("schedule", optimizers=(0,), actor=1)
PENALTY = Call("grad", actor=1, creates_graph=True)


def refused(kind: str, words: str) -> Call:
    return Call(kind, optimizers=(0,), actor=1, raised=f"{words} and so on")  # type: ignore[arg-type]


AGAIN = "unscale_() has already been called on this optimizer since the last update()."
AFTER_STEP = "unscale_() is being called after step()."
STEPPED = "step() has already been called since the last update()."
NOTHING = "No inf checks were recorded prior to update."

# Sequences of the loops in tests/zoo_misuse are not repeated here.
RIGHT: dict[str, tuple[Call, ...]] = {
    "an update of another scaler": (FRESH, OTHER_UPDATE, STEP, UPDATE),
    "an update of another scaler after unscale": (FRESH, Call("unscale", optimizers=(0,), actor=1), OTHER_UPDATE, STEP),
    "an update after unscale, and then new gradients": (
        FRESH,
        Call("unscale", optimizers=(0,), actor=1),
        UPDATE,
        FRESH,
        STEP,
    ),
    "the scale was asked for": (FRESH, GET_SCALE, CLIP, BARE),
    "a penalty that no loss uses": (PENALTY, UPDATE, FRESH),
    "a scheduler after a step": (FRESH, STEP, UPDATE, MOVE),
    "a step behind the scaler's, without gradients": (FRESH, STEP, Call("bare step", optimizers=(0,), rewritten=(0,))),
    "stale gradients that do no harm": (FRESH, SKIP, UPDATE, SCALED, STEP),
    "gradients that only seem to be left behind a step": (FRESH, STEP, UPDATE, SCALED, STEP, UPDATE),
    "gradients of another's loss, cleared before their own": (FRESH, STEP, UPDATE, ADDED, FRESH, STEP, UPDATE),
    "a plain loss beside a scaled one": (FRESH, PLAIN._replace(rewritten=()), STEP, UPDATE),
    "a scaled loss beside a plain one": (PLAIN, SCALED, PLAIN._replace(rewritten=()), STEP, UPDATE),
    "a plain loss beside one that is scaled unseen": (PLAIN, UNSCALED._replace(rewritten=()), STEP, UPDATE),
    "a plain loss whose gradients were written by hand": (PLAIN, FRESH, STEP, UPDATE),
    "a plain loss of who asks for the scale": (GET_SCALE, PLAIN, STEP, UPDATE),
    "a plain loss whose gradients get the scale": (PLAIN, GET_SCALE, STEP, UPDATE),
    "unscaled gradients on top of used ones": (
        FRESH,
        STEP,
        UPDATE,
        Call("backward", optimizers=(0,), added=(0,)),
        STEP,
    ),
    "a bare step behind unscale_, on other gradients": (FRESH, UNSCALE, BARE._replace(rewritten=(0,)), UPDATE),
    "what torch says that nobody knows": (refused("step", "out of memory"),),
}

again = refused("unscale", AGAIN)
WRONG: dict[str, tuple[tuple[Call, ...], Hit]] = {
    "clip in the second micro-batch": ((FRESH, SCALED, CLIP), Hit("misuse-clip-scaled", CLIP)),
    "bare behind a step that was withheld": ((FRESH, SKIP, BARE, UPDATE), Hit("misuse-bare-step", BARE)),
    "unscale between": ((FRESH, UNSCALE, SCALED), Hit("misuse-accumulate", UNSCALE)),
    "unscale and update between": ((FRESH, UNSCALE, UPDATE, SCALED), Hit("misuse-accumulate", UNSCALE)),
    "update between": ((FRESH, UPDATE, SCALED, STEP), Hit("misuse-accumulate", UPDATE)),
    "a step between": ((FRESH, STEP, UPDATE, ADDED, UNSCALE, STEP), Hit("misuse-accumulate", ADDED)),
    "a step between windows": ((FRESH, STEP, UPDATE, ADDED, SCALED, STEP), Hit("misuse-accumulate", ADDED)),
    "update before the step": ((FRESH, UPDATE, STEP), Hit("misuse-many-updates", UPDATE)),
    "update between unscale and the step": (
        (FRESH, Call("unscale", optimizers=(0,), actor=1), UPDATE, STEP),
        Hit("misuse-many-updates", UPDATE),
    ),
    "update before unscale": ((FRESH, UPDATE, UNSCALE, STEP), Hit("misuse-many-updates", UPDATE)),
    "scheduler": (
        (FRESH, SKIP, UPDATE, moved := MOVE._replace(step=1), moved),  # the skipped step has already ended
        Hit("misuse-scheduler-on-skip", MOVE),
    ),
    "plain": ((FRESH, STEP, UPDATE, PLAIN, STEP), Hit("misuse-unscaled-loss", PLAIN)),
    "plain in each micro-batch": (
        (PLAIN, PLAIN._replace(rewritten=(), step=1), UNSCALE, CLIP, STEP),
        Hit("misuse-unscaled-loss", PLAIN),
    ),
    "a new window": ((FRESH, STEP, FRESH, new := refused("unscale", AFTER_STEP)), Hit("misuse-no-update", new)),
    "a bare step, and no update": (
        (FRESH, UNSCALE, BARE, FRESH, again),
        Hit("misuse-bare-step", BARE._replace(raised=again.raised)),
    ),
    "a bare step now and then, and no update": (
        (FRESH, STEP, UPDATE, FRESH, UNSCALE, BARE, FRESH, again),
        Hit("misuse-no-update", again),
    ),
    "stepped in the last window": ((FRESH, STEP, FRESH, no := refused("step", STEPPED)), Hit("misuse-no-update", no)),
    "a bare step on gradients divided by hand": (
        (FRESH, GET_SCALE, DIVIDED, no_step := refused("update", NOTHING)._replace(optimizers=())),
        Hit("misuse-bare-step", DIVIDED._replace(raised=no_step.raised)),
    ),
    "one update more behind the step of another by hand": (
        (FRESH, STEP, UPDATE, DIVIDED, twice := refused("update", NOTHING)._replace(optimizers=())),
        Hit("misuse-many-updates", twice),
    ),
    "an update too early": ((FRESH, early := refused("update", NOTHING)), Hit("misuse-accumulate", early)),
}


def hits(calls: tuple[Call, ...]) -> list[Hit]:
    order = CallOrder()
    order.add_optimizer()
    order.add_optimizer()
    return [hit for call in calls for hit in (misuse_of_refusal(order, call) if call.raised else order.hits(call))]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_order_has_no_hit(name: str) -> None:
    assert hits(RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_blames_one_call(name: str) -> None:
    calls, expected = WRONG[name]
    assert hits(calls) == [expected]


def test_one_root_cause_has_one_hit() -> None:
    bare = (FRESH, BARE, refused("update", NOTHING))
    assert [hit.code for hit in hits(bare)] == ["misuse-bare-step"]
    accumulated = (FRESH, UNSCALE, SCALED, refused("unscale", AGAIN))
    assert [hit.code for hit in hits(accumulated)] == ["misuse-accumulate"]


def test_gradients_are_doubtful_once_and_again_where_a_second_step_uses_them() -> None:
    order = CallOrder()
    order.add_optimizer()
    order.add_optimizer()
    assert order.doubtful == {0, 1}
    order.doubtful.clear()  # as the caller does once it has looked
    for call in (FRESH, STEP, UPDATE, SCALED, FRESH, STEP, UPDATE, SCALED, UNSCALE):
        assert order.hits(call) == ()
        assert order.doubtful == set()
    assert order.hits(STEP) == ()
    assert order.doubtful == {0}


def test_calls_of_one_optimizer_are_not_blamed_on_another() -> None:
    second = Call("bare step", optimizers=(1,))
    assert hits((FRESH, second, STEP, UPDATE)) == []
    assert hits((FRESH, Call("clip", optimizers=(1,)), STEP, UPDATE)) == []
    assert [hit.code for hit in hits((FRESH, Call("clip", optimizers=(0, 1)), STEP))] == ["misuse-clip-scaled"]
