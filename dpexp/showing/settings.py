"""What is the same in all trials, what differs, and how both are called.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence

from pandas import DataFrame

CHOICES = ("data", "model", "group", "mechanism", "bound", "clip", "allocation", "sampling")
EPSILON, Z = "privacy.epsilon", "privacy.noise_multiplier"
DRAW = "draw"  # of private selection: tells repetitions apart, and comes last
_NAMES = {EPSILON: "target ε", Z: "z", "privacy.delta": "δ"}
_TOLD = ("optimizer.", "sampling.", "bound.", EPSILON, Z, "privacy.delta")
_FOLLOW = ("_target_", "policy", "n", "classes", "shape", "root", "module._target_")  # a choice implies them
_SECTIONS = ("optimizer.", "sampling.", "privacy.")  # whose keys speak for themselves
_WORDS = 4  # values in a label
_UNSET = "not set"


def settings(trials: DataFrame) -> DataFrame:
    """A row a trial; a column a choice, such as group, or a parameter, such as optimizer.lr; all as texts."""
    read = [json.loads(configuration) for configuration in trials["configuration"]]
    keys = sorted({key for parameters in read for key in parameters}, key=lambda key: (_rank(key), key))
    columns = {name: [_text(value) for value in trials[name]] for name in CHOICES}
    columns |= {key: [_text(parameters.get(key)) for parameters in read] for key in keys}
    return DataFrame(columns, index=trials.index, dtype=object)


def _rank(key: str) -> int:
    return 0 if key in (EPSILON, Z) else 2 if key == DRAW else 1


def _text(value: object) -> str:
    if value is None or value != value or value == "None":
        return _UNSET
    found = number(value)
    return str(value) if found is None else repr(found).removesuffix(".0")  # 1 and 1.0 are one setting


def number(value: object) -> float | None:
    """The finite number that a text says, if it says one."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def apart(table: DataFrame, first: Sequence[str] = ()) -> list[str]:
    """The columns of settings that tell configurations apart. Those that follow from the ones before them (as n does
    from the data) are left out; `first` come before all others."""
    kept: list[str] = []
    told = 1
    for column in dict.fromkeys((*(name for name in first if name in table), *table)):
        with_it = len(table[[*kept, column]].drop_duplicates())
        if with_it > told:
            kept, told = [*kept, column], with_it
    return kept


def labels(table: DataFrame, by: Sequence[str]) -> list[str]:
    """Each row's settings in words, such as `group=flat · lr=0.1`."""
    names = short_names(by)
    return [" · ".join(f"{names[key]}={_value(key, row[key])}" for key in by) for _, row in table.iterrows()]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """`lr` for `optimizer.lr`, unless another of the keys would be called so too."""
    plain = {key: _NAMES.get(key, key.removesuffix("._target_").removeprefix(_section(key))) for key in keys}
    often = list(plain.values())
    return {key: name if often.count(name) == 1 else key for key, name in plain.items()}


def _section(key: str) -> str:
    return next((section for section in _SECTIONS if key.startswith(section)), "")


def _value(key: str, value: str) -> str:
    return value.rpartition(".")[2] if key.endswith("._target_") else value


def held(trials: DataFrame, first: Sequence[str] = (), width: int = 120) -> str:
    """What is the same in all of these trials; and what differs but follows from what tells them apart
    (see `apart`)."""
    table = settings(trials)
    telling = apart(table, first)
    known = [key for key in table if not (key.partition(".")[0] in CHOICES and key.partition(".")[2] in _FOLLOW)]
    same = [key for key in known if table[key].nunique() == 1 and table[key].iloc[0] != _UNSET]
    same = [key for key in same if key in CHOICES or key.startswith(_TOLD)]
    along = [key for key in known if table[key].nunique() > 1 and key not in telling]
    names = short_names([*same, *along, *telling])
    told = "Fixed: " + " · ".join(f"{names[key]}={_value(key, table[key].iloc[0])}" for key in same) + "."
    if along:
        told += f" Not fixed, but following: {', '.join(names[key] for key in along)}."
    return textwrap.fill(told, width, break_long_words=False)


def shared(table: DataFrame, everywhere: DataFrame) -> str:
    """A label for the rows of settings that are drawn as one, which no other rows of `everywhere` have: the values to
    which they are confined, or where such words would take in others, the first row and how many are like it."""
    if len(table) == len(everywhere):
        return "the only configuration" if len(table) == 1 else f"all {len(table)} configurations"
    confined = {key: [*dict.fromkeys(table[key])] for key in table if set(table[key]) != set(everywhere[key])}
    order = [*confined]
    for key in sorted(order, key=lambda key: (-len(confined[key]), -order.index(key))):
        others = {name: values for name, values in confined.items() if name != key}
        if _inside(everywhere, others) == len(table):
            confined = others
    if _inside(everywhere, confined) > len(table) or any(len(values) > _WORDS for values in confined.values()):
        telling = [key for key in everywhere if everywhere[key].nunique() > 1]
        return f"{labels(table.head(1), telling)[0]} and {len(table) - 1} alike"
    names = short_names([*confined])
    words = [f"{names[key]}={' or '.join(_value(key, value) for value in confined[key])}" for key in confined]
    return " · ".join(words) + (f" ({len(table)} configurations)" if len(table) > 1 else "")


def _inside(table: DataFrame, confined: Mapping[str, Sequence[str]]) -> int:
    """How many rows have only such values."""
    for key, values in confined.items():
        table = table[table[key].isin(values)]
    return len(table)
