import pytest

from asyncflow.algorithms.schedule import learning_rate


def course(schedule, steps=10, warmup=0):
    return [learning_rate(step, peak=2.0, schedule=schedule, steps=steps, warmup=warmup) for step in range(steps + 1)]


def test_warm_up_rises_to_the_peak():
    assert course("constant", warmup=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_it_falls_from_the_peak_to_zero(schedule, warmup):
    rates = course(schedule, warmup=warmup)[warmup:]
    assert rates[0] == 2.0
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert rates == sorted(rates, reverse=True)


def test_linear_and_cosine_meet_half_way():
    assert course("linear")[5] == pytest.approx(1.0)
    assert course("cosine")[5] == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_longer_than_the_run_is_defined(schedule):
    assert course(schedule, steps=2, warmup=5) == pytest.approx([0.4, 0.8, 1.2])


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        learning_rate(0, peak=1.0, schedule="step", steps=1)
