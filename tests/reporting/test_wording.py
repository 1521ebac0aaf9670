"""Claims that are shown shorter than they are."""

import random

import pytest

from dpexp.reporting.wording import up


@pytest.mark.parametrize(
    "value, shown",
    [
        (1.0000049e-5, "1.001e-05"), (1e-5, "1e-05"), (0.1, "0.1"), (20.0, "20"), (2.9981, "2.999"),
        (9999.1, "1e+04"), (0.0, "0"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_what_is_shown_is_never_less_and_hardly_more(value, shown):
    assert up(value, 4) == shown


def test_of_any_number():
    draw = random.Random(0)
    for _ in range(2000):
        value, digits = 10 ** draw.uniform(-12, 4), draw.randint(2, 6)
        assert value <= float(up(value, digits)) <= value * (1 + 1.01 * 10 ** (1 - digits))
