"""Which failing steps of a script are replayed."""

from ampdbg.diagnosis.cause import SKIPS_IN_A_ROW
from ampdbg.script.failing_steps import MOST_OF_A_KIND, Policy


def lost(policy: Policy, optimizer: int) -> bool:
    """Returns whether the policy wants a step with a non-finite loss; if so, replays the step."""
    is_wanted = policy.wants("loss", optimizer, has_survived=False, is_nan=False, may_settle=True)
    if is_wanted:
        with policy.looking("loss"):
            pass
    return is_wanted


def row(policy: Policy, optimizer: int) -> list[int]:
    """Returns which steps, from 1 on, are replayed in a row in which only the gradients are not finite."""
    looked_at = []
    for skip in range(1, SKIPS_IN_A_ROW + 2):
        if policy.wants("gradients", optimizer, has_survived=False, is_nan=False, may_settle=True):
            with policy.looking("gradients"):
                looked_at.append(skip)
    return looked_at


def test_the_first_of_a_row_of_non_finite_losses_is_replayed_for_each_optimizer() -> None:
    policy = Policy()
    assert lost(policy, 0)
    policy.taken(1)
    assert not lost(policy, 0)
    policy.taken(0)
    assert [lost(policy, 0), lost(policy, 0), lost(policy, 1)] == [True, False, True]
    policy.taken(0)
    assert not lost(policy, 0)  # the limit for one kind is reached


def test_a_step_with_only_non_finite_gradients_ends_a_row_of_non_finite_losses() -> None:
    policy = Policy()
    assert lost(policy, 0)
    policy.wants("gradients", 0, has_survived=False, is_nan=False, may_settle=True)
    assert lost(policy, 0)


def test_replays_of_settling_scales_do_not_count_toward_the_limit_for_faults() -> None:
    policy = Policy()
    for fold in range(2 * MOST_OF_A_KIND):
        assert row(policy, fold) == [SKIPS_IN_A_ROW]
        policy.settled()
    for fault in range(10, 10 + MOST_OF_A_KIND):
        assert row(policy, fault) == [SKIPS_IN_A_ROW]
    assert row(policy, 20) == []


def test_settling_scales_are_replayed_up_to_a_limit_after_the_time_share_is_spent() -> None:
    policy = Policy()
    for _ in range(1000):
        policy.ended()
    policy.waited = 1e6
    for fold in range(MOST_OF_A_KIND):
        assert row(policy, fold) == [SKIPS_IN_A_ROW]
        policy.settled()
    assert row(policy, 10) == []


def test_the_first_step_of_a_row_whose_scale_cannot_settle_is_replayed_wherever_it_stands() -> None:
    policy, may_settle = Policy(), [True, True, False, False]
    wanted = [policy.wants("gradients", 0, has_survived=False, is_nan=False, may_settle=one) for one in may_settle]
    assert wanted == [False, False, True, False]
    policy.taken(0)
    assert policy.wants("gradients", 0, has_survived=False, is_nan=False, may_settle=False)


def test_a_step_whose_scale_cannot_settle_is_replayed_even_without_time_left() -> None:
    for may_settle in (True, False):
        policy = Policy()
        for _ in range(1000):
            policy.ended()
        policy.waited = 1e6
        is_wanted = policy.wants("gradients", 0, has_survived=True, is_nan=False, may_settle=may_settle)
        assert (is_wanted, policy.put_off) == (not may_settle, int(may_settle))
