"""Claims that are shown shorter than they are."""

import ast
import itertools
import random
import re
from pathlib import Path

import pytest

from dpexp.accounting.rounding import down, up

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
ROUNDED = {"up", "down"}


def names_in(node):
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute):
            yield part.id if isinstance(part, ast.Name) else part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def called(node):
    return getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""


def formats(tree):
    """The lines where an ε becomes text by other means than `up` and `down`; in a function about ε, any number.

    A name without a format stands for a text that was made by them.
    """
    about = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "epsilon" in node.name]
    inside = {id(node) for function in about for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [ast.Constant(""), *node.values]
            for before, part in itertools.pairwise(parts):
                if not isinstance(part, ast.FormattedValue) or called(part.value) in ROUNDED:
                    continue
                text = before.value if isinstance(before, ast.Constant) else ""
                after_epsilon = re.search(r"[εδ] *(=|≤|<=|is at least|of)? *$", text)
                is_claim = after_epsilon or id(node) in inside or any(map(CLAIM.search, names_in(part.value)))
                if (part.format_spec and is_claim) or (after_epsilon and not isinstance(part.value, ast.Name)):
                    yield part.lineno
        elif called(node) in ("format", "round", "format_float_positional") and any(map(CLAIM.search, names_in(node))):
            yield node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(getattr(node.left, "value", None), str):
            yield from [node.lineno] * any(map(CLAIM.search, names_in(node)))


@pytest.mark.parametrize(
    "line",
    [
        'f"{values:.4g} at ε = {x:.3g}"', 'f"ε = {self.limit}"', 'f"ε ≤ {run.cost:g}"', 'f"{run.epsilon:.3f}"',
        'def epsilon_over_rounds(values): return f"{values[-1]:.4g}"', 'f"{epsilon(ledger, delta):.4g}"',
        "round(epsilon, 3)", '"%.3f" % spent', '"{:.3f}".format(epsilon)', "f\"{result['epsilon']:.3g}\"",
        'f"at δ = {bound.delta:g}"',
    ],
)  # fmt: skip
def test_a_place_that_formats_an_epsilon_is_found(line):
    assert [*formats(ast.parse(line))] == [1]
    assert not [*formats(ast.parse('f"ε = {up(value, 4)} of {count:g}, at least {down(epsilon, 3)}, ε = {shown}"'))]


def test_nothing_else_formats_an_epsilon():
    found = [
        f"{path}:{line}" for path in sorted(PACKAGE.rglob("*.py")) for line in formats(ast.parse(path.read_text()))
    ]
    assert not found
