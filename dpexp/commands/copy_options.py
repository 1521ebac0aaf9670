"""`python -m dpexp copy`: the composed options in one YAML file, with their comments, to edit and run again."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from dpexp.commands.command_line import as_overrides, check, with_config_file
from dpexp.config import CONF
from dpexp.errors import ConfigError


def copy(arguments: Sequence[str]) -> None:
    """Writes the file, and prints how it is run."""
    given = [argument for argument in arguments if "=" in argument or argument.startswith("~")]
    names, asked = [one for one in arguments if one not in given], " ".join(" ".join(arguments).split())
    if len(names) != 1 or not names[0].endswith(".yaml") or any(re.match("hydra|sweep=", one) for one in given):
        raise ConfigError(f"copy {asked}: give the options of one job, and one FILE.yaml to write.")
    if (path := Path(names[0])).exists():
        raise ConfigError(f"{path} exists already; name another file, or delete it.")
    check(given)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", as_overrides(given), return_hydra_config=True)
    chosen, cfg = cfg.hydra.runtime.choices, OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    comments: dict[str, list[str]] = defaultdict(list)
    for group, option in {"": "config", **chosen}.items():
        file, key = CONF / group / f"{option}.yaml", group
        text = file.read_text() if file.exists() and "hydra" not in group else ""
        for here, line in _keyed(text, f"{group}." if group and "@package _global_" not in text else ""):
            key = here or key  # a comment alone in its line goes on, or describes the option
            comments[key] += re.findall("(?<!\\S)# (?!@package).*", line)
    _, defaults, _, hydra = re.split(r"^(?=defaults|seed|hydra)", (CONF / "config.yaml").read_text(), flags=re.M)
    for group, option in {**chosen, "experiment": None, "sweep": None}.items():  # whose values are in the file
        defaults = re.sub(rf"(?<= {group}: )\w+", option or "null", defaults)
    defaults = f"{defaults.rstrip()}\n  - override clip_norm: {chosen['clip_norm'] or 'null'}  # which others change\n"
    lines = [f"# python -m dpexp copy {asked}", *comments["experiment"], defaults]
    for key, line in _keyed(OmegaConf.to_yaml(cfg)):
        lines += [re.match(" *", line)[0] + comment for comment in comments[key] if key] + [line]  # type: ignore[index]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "", hydra]))
    _, folder, _, name, *searchpath = with_config_file([str(path)])
    with suppress(HydraException), initialize_config_dir(folder, version_base="1.3"):
        if OmegaConf.to_container(compose(name, searchpath)) == OmegaConf.to_container(cfg):
            print(f"Edit {path}, and run it: python -m dpexp {path}")
            return
    path.unlink()
    raise ConfigError(f"copy {asked}: a file takes no ~key and no new +key; give these when it is run.")


def _keyed(text: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each line of a YAML text with its dotted key; "" where a line has none."""
    path: list[str] = []
    for line in text.splitlines():
        if key := re.match(r"( *)'?([\w/.]+)'?:( |$)", line):
            path[len(key[1]) // 2 :] = [key[2]]
        yield prefix + ".".join(path) if key else "", line
