"""The three rooms: what each folder may import."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dpexp"
FORBIDDEN = {
    "training": {"dpexp.privacy", "dpexp.accounting", "mlflow", "hydra", "omegaconf"},
    "privacy": {"dpexp.training", "mlflow", "hydra", "omegaconf", "dp_accounting"},
    "accounting": {
        "dpexp.privacy", "dpexp.training", "torch", "pytorch_lightning", "lightning", "hydra", "omegaconf", "mlflow",
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


@pytest.mark.parametrize("room, path", FILES, ids=lambda value: str(value).rpartition("dpexp/")[2])
def test_no_import_across_the_wall(room, path):
    crossed = {name for name in imports(path) for wall in FORBIDDEN[room] if f"{name}.".startswith(f"{wall}.")}
    assert not crossed


def test_only_tracking_knows_mlflow():
    knowing = {path.parent.name for path in PACKAGE.rglob("*.py") if any(n.startswith("mlflow") for n in imports(path))}
    assert knowing == {"tracking"}
