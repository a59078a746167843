"""The planner by hand: costs between measured points, counts of passes, choices, second looks."""

import pytest

from recsys.decoding.planner import Load, Passes, PassTimes, Plan, Planner
from recsys.modes import Mode

# Launch-bound up to 64 tokens, then 1 ms for each 64 more; a batch of 8 costs as 8 requests do.
GPU = PassTimes({1: ((4, 2.0), (64, 2.0), (256, 5.0)), 8: ((4, 2.0), (64, 9.0), (256, 33.0))})
DRAFT = PassTimes({1: ((4, 0.2), (256, 0.4)), 8: ((4, 0.2), (256, 1.0))})
# In proportion to the tokens from the first one on.
CPU = PassTimes({1: ((4, 4.0), (256, 256.0)), 8: ((4, 32.0), (256, 2048.0))})


def planner(times, draft=DRAFT):
    nodes = () if draft is None else (128, 256)
    return Planner(times, draft, levels=4, first_level=91, nodes=nodes)


@pytest.mark.parametrize(
    ("batch", "tokens", "expected"),
    [
        (1, 4, 2.0),
        (1, 1, 2.0),  # not less than the least that was measured
        (1, 160, 3.5),  # halfway between 2 and 5
        (1, 448, 8.0),  # on along the last line
        (8, 256, 33.0),
        (4.5, 256, 19.0),  # halfway between the batches
        (15, 256, 61.0),
    ],
)
def test_times_are_interpolated_between_measurements(batch, tokens, expected):
    assert GPU(batch, tokens) == pytest.approx(expected)


def test_pass_counts_decay_from_their_prior():
    passes = Passes([1.0, 1.0])
    assert passes.more_than(1) == 0.5
    for _ in range(500):
        passes.add(1)
    assert passes.more_than(1) < 0.001
    for _ in range(500):
        passes.add(5)  # counts as the last
    assert passes.more_than(1) > 0.999
    assert passes.more_than(2) == 0


def test_drafts_win_where_launches_dominate():
    gpu, cpu, load = planner(GPU), planner(CPU), Load(1, 4, 20)
    for each in (gpu, cpu):
        for plan in each.plans:
            for _ in range(100):
                passes = 1 if plan.mode == "draft" else 2
                each.learn(plan, load, each.forwards(plan, load, [passes]), [passes])
    assert gpu.choose(load) == Plan(Mode.DRAFT, 128)
    assert cpu.choose(load) == Plan(Mode.BEAM)


def test_a_draft_that_stays_wrong_is_abandoned():
    each, load = planner(GPU), Load(1, 4, 20)
    for _ in range(200):
        plan = each.choose(load)
        passes = [4 if plan.mode == "draft" else 2]
        each.learn(plan, load, each.forwards(plan, load, passes), passes)
    assert each.choose(load) == Plan(Mode.EXHAUSTIVE)


def test_unexplained_time_is_learned():
    each, load = planner(GPU), Load(1, 4, 20)
    before = each.choose(load)
    assert before.mode != "beam"
    for plan in each.plans:
        slow = 0.0 if plan.mode == "beam" else 100.0
        each.learn(plan, load, each.expect(plan, load) + slow, [2])
    chosen = [each.choose(load) for _ in range(40)]
    assert chosen[0] == before  # what was best is kept for a while
    assert set(chosen[20:]) == {Plan(Mode.BEAM)}
    # another batch size has its own record
    assert each.choose(Load(16, 4, 20)) == each.choose(Load(16, 4, 20))


@pytest.mark.parametrize(("slower", "tries"), [(1.4, 9), (9.0, 0)])
def test_exploration_is_rare_and_limited_to_close_plans(slower, tries):
    each, load = planner(CPU, draft=None), Load(1, 100, 20)
    seconds = {Plan(Mode.BEAM): 1.0, Plan(Mode.EXHAUSTIVE): slower}
    for plan in each.plans:
        each.learn(plan, load, seconds[plan], [2])
    chosen = []
    for _ in range(640):
        chosen.append(each.choose(load))
        each.learn(chosen[-1], load, seconds[chosen[-1]], [2])
    assert chosen.count(Plan(Mode.EXHAUSTIVE)) in (tries, 10 * (tries > 0))


def test_unexplained_time_may_be_negative():
    """Measured on long prompts, asked about short ones."""
    each = Planner(PassTimes({1: ((4, 0.001), (256, 0.1))}), None, levels=4, first_level=91)
    for _ in range(3):
        each.learn(Plan(), Load(1, 256, 20), 0.02, [4])
    assert each.expect(Plan(), Load(1, 4, 20)) < 0
    assert {each.choose(Load(1, 4, 20)) for _ in range(200)} <= set(each.plans)


def test_a_draft_costs_its_prompt_and_a_pass_a_level():
    even = PassTimes({1: ((4, 1.0), (256, 1.0))})  # every pass of the target takes 1
    tenth = PassTimes({1: ((4, 0.1), (256, 0.1))})
    load, plan = Load(1, 30, 20), Plan(Mode.DRAFT, 128)
    each = Planner(even, tenth, levels=4, first_level=91, nodes=(128,))
    # the prompt and two levels by the draft, then one pass, two, or three of the target
    for passes, expected in ((1, 1.3), (2, 2.3), (3, 3.3)):
        assert each.forwards(plan, load, [passes]) == pytest.approx(expected)
    assert each.forwards(Plan(), load) == pytest.approx(4.0)
