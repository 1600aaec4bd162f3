"""Which failing steps of a script are replayed."""

from ampdbg.diagnosis.cause import SKIPS_IN_A_ROW
from ampdbg.script.failing_steps import MOST_OF_A_KIND, Policy


def lost(policy: Policy, optimizer: int) -> bool:
    """Whether a step that has lost its loss is looked at; if so, it is."""
    is_wanted = policy.wants("loss", optimizer, has_borne=False, is_nan=False, may_settle=True)
    if is_wanted:
        with policy.looking("loss"):
            pass
    return is_wanted


def row(policy: Policy, optimizer: int) -> list[int]:
    """Which steps are looked at of a row whose gradients alone are not finite, from 1 on."""
    looked_at = []
    for skip in range(1, SKIPS_IN_A_ROW + 2):
        if policy.wants("gradients", optimizer, has_borne=False, is_nan=False, may_settle=True):
            with policy.looking("gradients"):
                looked_at.append(skip)
    return looked_at


def test_the_first_of_a_row_of_lost_losses_is_replayed_whatever_other_optimizers_do_in_between() -> None:
    policy = Policy()
    assert lost(policy, 0)
    policy.taken(1)
    assert not lost(policy, 0)
    policy.taken(0)
    assert [lost(policy, 0), lost(policy, 0), lost(policy, 1)] == [True, False, True]
    policy.taken(0)
    assert not lost(policy, 0)  # as many of a kind were


def test_a_step_whose_gradients_alone_are_not_finite_ends_a_row_of_lost_losses() -> None:
    policy = Policy()
    assert lost(policy, 0)
    policy.wants("gradients", 0, has_borne=False, is_nan=False, may_settle=True)
    assert lost(policy, 0)


def test_scales_that_settle_leave_the_replays_to_the_fault_behind_them() -> None:
    policy = Policy()
    for fold in range(2 * MOST_OF_A_KIND):
        assert row(policy, fold) == [SKIPS_IN_A_ROW]
        policy.settled()
    for fault in range(10, 10 + MOST_OF_A_KIND):
        assert row(policy, fault) == [SKIPS_IN_A_ROW]
    assert row(policy, 20) == []


def test_scales_that_settle_are_replayed_within_a_share_of_the_run_alone() -> None:
    policy = Policy()
    for _ in range(1000):
        policy.ended()
    policy.waited = 1e6
    for fold in range(MOST_OF_A_KIND):
        assert row(policy, fold) == [SKIPS_IN_A_ROW]
        policy.settled()
    assert row(policy, 10) == []


def test_a_step_that_fails_where_only_fractions_are_lower_is_replayed_however_little_time_there_is() -> None:
    for may_settle in (True, False):
        policy = Policy()
        for _ in range(1000):
            policy.ended()
        policy.waited = 1e6
        is_wanted = policy.wants("gradients", 0, has_borne=True, is_nan=False, may_settle=may_settle)
        assert is_wanted is not may_settle
