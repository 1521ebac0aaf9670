"""The rooms: what each folder may import."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dpexp"
FORBIDDEN = {
    "training": {
        "dpexp.privacy", "dpexp.accounting", "dpexp.reporting", "dpexp.tracking", "mlflow", "hydra", "omegaconf",
    },
    "privacy": {"dpexp.training", "dpexp.reporting", "dpexp.tracking", "mlflow", "hydra", "omegaconf", "dp_accounting"},
    "accounting": {
        "dpexp.privacy", "dpexp.training", "dpexp.reporting", "dpexp.tracking", "torch", "pytorch_lightning",
        "lightning",
        "hydra", "omegaconf", "mlflow",
    },
    "showing": {
        "dpexp.privacy", "dpexp.training", "dpexp.tracking", "torch", "pytorch_lightning", "lightning", "hydra",
        "omegaconf", "mlflow", "dp_accounting",
    },
    "tracking": {"dpexp.training"},
    "commands": {"mlflow"},
}  # fmt: skip
EXCEPT = {
    "showing": {"dpexp.privacy.plan.plan", "dpexp.privacy.private_metrics", "dpexp.privacy.noise.correlated"},
    "reporting/terminal.py": {  # it watches a training under way
        "dpexp.privacy.callback", "dpexp.privacy.plan.schedules", "pytorch_lightning", "omegaconf",
    },
}  # fmt: skip
FILES = [(room, path) for room in FORBIDDEN for path in sorted((PACKAGE / room).rglob("*.py"))]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, walls):
    return any(f"{name}.".startswith(f"{wall}.") for wall in walls)


def crossings(room, path):
    walls = FORBIDDEN[room] | ({"dpexp.commands"} if room != "commands" else set())
    doors = EXCEPT.get(room, set()) | EXCEPT.get(f"{room}/{path.name}", set())
    return {name for name in imports(path) if within(name, walls) and not within(name, doors)}


@pytest.mark.parametrize("room, path", FILES, ids=lambda value: str(value).rpartition("dpexp/")[2])
def test_no_import_across_the_wall(room, path):
    assert not crossings(room, path)


@pytest.mark.parametrize(
    "room, line, crossed",
    [
        ("showing", "from dpexp.privacy.plan.plan import PrivacyPlan", False),
        ("showing", "from dpexp.privacy.callback import PrivacyCallback", True),
        ("showing", "import mlflow.pyfunc", True),
        ("showing", "def late():\n    from hydra import main", True),
        ("showing", "from dpexp.tracking.read import trials", True),
        ("tracking", "from dpexp.commands.report import report", True),
        ("tracking", "from dpexp.reporting.sweep_figures import frontier", False),
        ("privacy", "import dpexp.reporting", True),
        ("commands", "from dpexp.tracking.read import trials", False),
    ],
)
def test_the_walls_hold(room, line, crossed, tmp_path):
    (tmp_path / "a.py").write_text(line)
    assert bool(crossings(room, tmp_path / "a.py")) is crossed


def test_every_room_has_walls():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(FORBIDDEN)


def test_only_tracking_knows_mlflow():
    knowing = {path.parent.name for path in PACKAGE.rglob("*.py") if any(n.startswith("mlflow") for n in imports(path))}
    assert knowing == {"tracking"}


def _private(name):
    return name.startswith("_") and not name.startswith("__")


def _foreign(tree, own):
    """Private names of other packages that a file imports or reads; ours are defined somewhere in the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not f"{node.module}.".startswith("dpexp."):
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            parts = [] if node.attr in own else [node.attr]
        else:
            continue
        yield from filter(_private, parts)


def _defined(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_private_names_of_other_packages_are_in_the_compat_files():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if "_compat" not in path.name}
    own = {name for tree in trees.values() for name in _defined(tree)} | {"_target_", "_convert_", "_exit"}
    found = {str(path.relative_to(PACKAGE)): [*_foreign(tree, own)] for path, tree in trees.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_private_name_is_found():
    tree = ast.parse("from torch._C import _functorch\nimport hydra._internal\nx._base.own, self._mine\n")
    assert sorted(_foreign(tree, {"_mine"})) == ["_C", "_base", "_functorch", "_internal"]
