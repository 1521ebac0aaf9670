"""Claims that are shown shorter than they are."""

import ast
import itertools
import random
import re
from pathlib import Path

import pytest

from dpexp.accounting.rounding import down, up
from dpexp.reporting.wording import guarantee_in_words

PACKAGE = Path(__file__).parents[2] / "dpexp"


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
        assert value >= float(down(value, digits)) >= value * (1 - 1.01 * 10 ** (1 - digits))


# No other place formats a claim

CLAIM = re.compile(r"epsilon|(^|_)eps($|_)|ε|claimed|spent|at_most|composed", re.I)
BEFORE = re.compile(r"[εδ] *(=|≤|<=|is at least|of)? *$")


def called(node):
    return getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""


def claims(node):
    """Whether an expression names an ε."""
    parts = [getattr(part, "id", getattr(part, "attr", getattr(part, "value", ""))) for part in ast.walk(node)]
    return any(CLAIM.search(part) for part in parts if isinstance(part, str))


def formats(tree):
    """The lines where an ε becomes text by other means than `up` and `down`. A name without a format stands for a text
    that was made by them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for before, part in itertools.pairwise([ast.Constant(""), *node.values]):
                if not isinstance(part, ast.FormattedValue) or called(part.value) in ("up", "down"):
                    continue
                after = isinstance(before, ast.Constant) and BEFORE.search(before.value)
                spec = part.format_spec
                if (after and (spec or not isinstance(part.value, ast.Name))) or (spec and claims(part.value)):
                    yield part.lineno
            continue
        formatted = isinstance(node, ast.BinOp) and isinstance(getattr(node.left, "value", None), str)
        if (formatted or called(node) in ("format", "round", "format_float_positional")) and claims(node):
            yield node.lineno


def test_nothing_else_formats_an_epsilon():
    bad = (
        'f"{values:.4g} at ε = {x:.3g}"', 'f"ε = {self.limit}"', 'f"ε ≤ {run.cost:g}"', 'f"{run.epsilon:.3f}"',
        'f"{epsilon(ledger, delta):.4g}"', "round(epsilon, 3)", '"%.3f" % spent', '"{:.3f}".format(epsilon)',
        "f\"{result['epsilon']:.3g}\"", 'f"at δ = {bound.delta:g}"',
    )  # fmt: skip
    assert [[*formats(ast.parse(line))] for line in bad] == [[1]] * len(bad)
    assert not [*formats(ast.parse('f"ε = {up(value, 4)} of {count:g}, at least {down(epsilon, 3)}, ε = {shown}"'))]
    found = [
        f"{path}:{line}" for path in sorted(PACKAGE.rglob("*.py")) for line in formats(ast.parse(path.read_text()))
    ]
    assert not found


def test_no_finite_factor_is_claimed_for_an_epsilon_beyond_floats():
    figures = {"advantage": 1.0, "tpr_at_fpr_0.001": 1.0, "tpr_at_fpr_0.01": 1.0}
    for spent, said in ((1.0, "2.72-fold"), (800.0, "inf-fold")):
        result = {"epsilon": {"pld": spent}, "delta": 1e-5, "adjacency": "add_remove", "risk": figures}
        assert f"at most {said}, plus 1e-05" in guarantee_in_words(result)[2]
