"""What each folder may import.

From the bottom up: errors, config and the compat files; training and accounting, which know neither each other nor
privacy; privacy/noise, then privacy/sampling, then privacy/plan, beside them privacy/gradients; the files of privacy/;
reporting; tracking; commands. A folder imports only from those below it, and no modules import each other in a circle.

What does not hold yet, in CROSSINGS: plan, sampling and gradients use a few files of privacy/ (checks, distributed),
sampling uses one file each of plan and gradients, and gradients uses noise, sampling and plan.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dpexp"
SLOW = {"torch", "pytorch_lightning", "lightning", "hydra", "omegaconf", "mlflow"}
ABOVE_PRIVACY = {"dpexp.training", "dpexp.reporting", "dpexp.tracking", "dpexp.commands"}
PRIVACY = ABOVE_PRIVACY | {"mlflow", "hydra", "omegaconf", "dp_accounting"}
FORBIDDEN = {
    "training": ABOVE_PRIVACY - {"dpexp.training"}
    | {"dpexp.privacy", "dpexp.accounting", "mlflow", "hydra", "omegaconf"},
    "accounting": ABOVE_PRIVACY | SLOW | {"dpexp.privacy"},
    "privacy/noise": PRIVACY | {"dpexp.privacy.sampling", "dpexp.privacy.plan", "dpexp.privacy.gradients"},
    "privacy/sampling": PRIVACY,
    "privacy/plan": PRIVACY | {"dpexp.privacy.gradients"},
    "privacy/gradients": PRIVACY,
    "privacy": PRIVACY,
    "reporting": SLOW | {"dpexp.privacy", "dpexp.training", "dpexp.tracking", "dpexp.commands", "dp_accounting"},
    "tracking": {"dpexp.training", "dpexp.commands"},
    "commands": {"mlflow"},
}
EXCEPT = {
    "reporting": {"dpexp.privacy.plan.plan", "dpexp.privacy.private_metrics", "dpexp.privacy.noise.correlated"},
    "reporting/terminal.py": {  # it watches a running training
        "dpexp.privacy.callback", "dpexp.privacy.plan.schedules", "pytorch_lightning", "omegaconf",
    },
}  # fmt: skip
# Pairs of folders that do not keep the order yet
CROSSINGS = {
    ("privacy/plan", "privacy"), ("privacy/sampling", "privacy"), ("privacy/gradients", "privacy"),
    ("privacy/sampling", "privacy/plan"), ("privacy/sampling", "privacy/gradients"),
    ("privacy/gradients", "privacy/noise"), ("privacy/gradients", "privacy/sampling"),
    ("privacy/gradients", "privacy/plan"),
}  # fmt: skip
LAYERS = [
    {"top"}, {"training", "accounting"}, {"privacy/noise"}, {"privacy/sampling"}, {"privacy/plan", "privacy/gradients"},
    {"privacy"}, {"reporting"}, {"tracking"}, {"commands"},
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room_of(path):
    """The most specific folder of FORBIDDEN that has a file."""
    folder = path.relative_to(PACKAGE).parent.as_posix()
    return max((room for room in FORBIDDEN if f"{folder}/".startswith(f"{room}/")), key=len, default="top")


FILES = [(room_of(path), path) for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) != "top"]


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
    doors = EXCEPT.get(room, set()) | EXCEPT.get(f"{room}/{path.name}", set())
    return {name for name in imports(path) if within(name, FORBIDDEN[room]) and not within(name, doors)}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_import_across_the_wall(room):
    assert {path.name: found for of, path in FILES if of == room and (found := crossings(room, path))} == {}


@pytest.mark.parametrize(
    "room, line, crossed",
    [
        ("reporting", "from dpexp.privacy.plan.plan import PrivacyPlan", False),
        ("reporting", "from dpexp.privacy.callback import PrivacyCallback", True),
        ("reporting", "import mlflow.pyfunc", True),
        ("reporting", "def late():\n    from hydra import main", True),
        ("reporting", "from dpexp.tracking.read import trials", True),
        ("tracking", "from dpexp.commands.report import report", True),
        ("privacy", "import dpexp.reporting", True),
        ("privacy/noise", "from dpexp.privacy.plan.plan import PrivacyPlan", True),
        ("commands", "from dpexp.tracking.read import trials", False),
    ],
)
def test_the_walls_hold(room, line, crossed, tmp_path):
    (tmp_path / "a.py").write_text(line)
    assert bool(crossings(room, tmp_path / "a.py")) is crossed


def test_every_room_has_walls():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(FORBIDDEN)
    assert {*FORBIDDEN, "top"} == set(LEVEL)


def top_level(nodes):
    """The imports that run when a module is imported."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from top_level([*node.body, *(one for handler in node.handlers for one in handler.body)])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from top_level([*node.body, *node.orelse])


def graph():
    """module -> (its file, the modules of the package that it imports at the top level)."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("dpexp", *path.relative_to(PACKAGE).with_suffix("").parts))
        files[name.removesuffix(".__init__")] = path
    found = {}
    for module, path in files.items():
        names = set()
        for node in top_level(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            else:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in files else str(node.module) for name in full}
        found[module] = path, {name for name in names if name in files and name != module}
    return found


def components(edges):
    """The strongly connected components with several members (Kosaraju)."""
    order, seen = [], set()

    def visit(node, edges, out):
        if node not in seen:
            seen.add(node)
            for other in edges[node]:
                visit(other, edges, out)
            out.append(node)

    for node in edges:
        visit(node, edges, order)
    back = {node: {other for other in edges if node in edges[other]} for node in edges}
    seen.clear()
    found = []
    for node in reversed(order):
        visit(node, back, component := [])
        found += [component] if len(component) > 1 else []
    return found


def test_no_modules_import_each_other_in_a_circle():
    assert components({module: imported for module, (_, imported) in graph().items()}) == []
    assert sorted(*components({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == ["b", "c"], "a circle is found"


def test_a_folder_imports_from_those_below_it():
    modules = graph()
    pairs = {(room_of(path), room_of(modules[name][0])) for path, names in modules.values() for name in names}
    pairs = {(room, other) for room, other in pairs if room != other and "top" not in (room, other)}
    assert {(room, other) for room, other in pairs if LEVEL[room] <= LEVEL[other]} <= CROSSINGS


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
