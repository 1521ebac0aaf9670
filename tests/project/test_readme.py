"""README's table is that of the code."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_table_names_every_option():
    conf = Path(__file__).parents[2] / "conf"
    table = README.partition("## Configuration")[2].partition("## ")[0]
    for folder in sorted({path.parent for path in conf.glob("**/*.yaml")} - {conf}):
        name = folder.relative_to(conf).as_posix()
        (row,) = re.findall(rf"^\| `{name}` \| (.*?) \|", table, re.MULTILINE)
        options, named = {path.stem for path in folder.glob("*.yaml")}, set(re.findall(r"`(\w+)`", row))
        assert options <= named if name.startswith("hydra/") else options == named, name  # Hydra brings some of its own
