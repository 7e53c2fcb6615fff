from openforge.cli.supervise import Policy, after_death

POLICY = Policy(quick_deaths=4, quick_s=10, first_pause_s=0.5, longest_pause_s=3)


def test_the_pause_doubles_with_each_quick_death_up_to_the_longest() -> None:
    pauses = [after_death(POLICY, 1, lived_s=11, quick_deaths=deaths).pause_s for deaths in (1, 2, 3, 4, 5)]
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_too_many_quick_deaths_in_a_row_end_it() -> None:
    assert after_death(POLICY, -9, lived_s=1, quick_deaths=3).pause_s is not None
    assert after_death(POLICY, -9, lived_s=1, quick_deaths=4).pause_s is None


def test_bad_settings_and_zombies_are_not_tried_again() -> None:
    assert after_death(POLICY, 2, lived_s=1, quick_deaths=1).reason == "it refuses its settings"
    assert after_death(POLICY, 3, lived_s=100, quick_deaths=1).reason == "another process does its work"
