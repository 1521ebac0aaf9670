"""What each folder may import: the table of docs/architecture.md. No modules import each other in a circle."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dpexp"
APPLICATION = {"hydra", "omegaconf", "mlflow"}
HEAVY = APPLICATION | {"torch", "pytorch_lightning", "lightning"}
PRIVACY = {"privacy", "privacy/gradients", "privacy/noise", "privacy/plan", "privacy/sampling"}
# folder -> the folders from which it may import, and the libraries that it may not import
ROOMS = {
    "training": (set(), APPLICATION),
    "accounting": (set(), HEAVY),
    "privacy/noise": ({"accounting"}, APPLICATION),
    "privacy/sampling": ({"accounting", *PRIVACY}, APPLICATION),
    "privacy/plan": ({"accounting", *PRIVACY} - {"privacy/gradients"}, APPLICATION),
    "privacy/gradients": (PRIVACY, APPLICATION),
    "privacy": ({"accounting", *PRIVACY}, APPLICATION | {"dp_accounting"}),
    "reporting": ({"accounting", *PRIVACY} - {"privacy/gradients", "privacy/sampling"}, HEAVY),
    "tracking": ({"accounting", "reporting", *PRIVACY}, {"hydra", "omegaconf"}),
    "integrations": ({"accounting", "reporting", *PRIVACY}, APPLICATION),
    "commands": ({"accounting", "reporting", "tracking", "training", *PRIVACY}, {"mlflow"}),
}
WATCHES_A_TRAINING = {"reporting/terminal.py": {"pytorch_lightning"}}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def room_of(path):
    """The most specific folder of ROOMS that has a file; top: none."""
    folder = path.relative_to(PACKAGE).parent.as_posix()
    return max((room for room in ROOMS if f"{folder}/".startswith(f"{room}/")), key=len, default="top")


FILES = {
    ".".join(("dpexp", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(nodes):
    """The modules that some nodes of a syntax tree import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from {name if name in FILES else str(node.module) for name in names}


def crossings(room, tree, allowed=frozenset()):
    """What a file of a folder may not import, also inside of functions."""
    folders, libraries = ROOMS[room]
    for name in imported(ast.walk(tree)):
        if name.startswith("dpexp.") and name in FILES:
            if room_of(FILES[name]) not in {room, "top", *folders}:
                yield name
        elif name.partition(".")[0] in libraries - allowed:
            yield name


@pytest.mark.parametrize("room", ROOMS)
def test_a_folder_imports_what_it_may(room):
    for path in FILES.values():
        allowed = WATCHES_A_TRAINING.get(path.relative_to(PACKAGE).as_posix(), frozenset())
        assert room_of(path) != room or not [*crossings(room, tree_of(path), allowed)], path


@pytest.mark.parametrize(
    "room, line",
    [
        ("accounting", "import torch.nn"),
        ("training", "from dpexp.accounting.accountants import epsilon"),
        ("privacy/noise", "from dpexp.privacy.plan.plan import PrivacyPlan"),
        ("reporting", "def late():\n    from dpexp.tracking.read import trials"),
        ("commands", "import mlflow"),
    ],
)
def test_what_it_may_not_import_is_found(room, line):
    assert [*crossings(room, ast.parse(line))]


def taking_the_configuration(tree):
    """The functions of a file that take a configuration as a parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given = {one.arg for one in parameters} | {
                ast.unparse(one.annotation) for one in parameters if one.annotation
            }
            if given & {"cfg", "DictConfig", "Config"}:
                yield getattr(node, "name", "lambda")


def test_only_commands_take_the_configuration():
    """Below them it is not imported either: the table has omegaconf and hydra of each folder."""
    below = {name: path for name, path in FILES.items() if room_of(path) not in ("commands", "top")}
    assert [name for name, path in below.items() if [*taking_the_configuration(tree_of(path))]] == []
    assert all("omegaconf" in libraries for room, (_, libraries) in ROOMS.items() if room != "commands")
    example = ast.parse("def a(cfg): ...\ndef b(x: DictConfig): ...\ndef c(x: int): ...\n")
    assert [*taking_the_configuration(example)] == ["a", "b"]


def test_every_folder_is_in_the_table():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= {*ROOMS}


def test_no_modules_import_each_other_in_a_circle():
    """Nor inside of functions, or for their types alone."""
    trees = {name: tree_of(path) for name, path in FILES.items()}
    graph = {name: {*imported(ast.walk(tree))} & {*FILES} - {name} for name, tree in trees.items()}
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"dpexp.errors": {"dpexp.privacy.round"}}).prepare()


def private_names(tree, own):
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
        yield from (part for part in parts if part.startswith("_") and not part.startswith("__"))


def defined(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_private_names_of_other_packages_are_in_the_compat_files():
    trees = {path: tree_of(path) for path in FILES.values() if "_compat" not in path.name}
    own = {name for tree in trees.values() for name in defined(tree)} | {"_target_", "_convert_", "_exit"}
    assert {path: names for path, tree in trees.items() if (names := [*private_names(tree, own)])} == {}
    example = ast.parse("from torch._C import _functorch\nimport hydra._internal\nx._base.own, self._mine\n")
    assert sorted(private_names(example, {"_mine"})) == ["_C", "_base", "_functorch", "_internal"]
