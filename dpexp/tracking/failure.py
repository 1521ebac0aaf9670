"""What others may read of an error."""

import traceback
from contextlib import suppress
from pathlib import Path

from dpexp.errors import ConfigError, is_own

_OWN_WORDS = ("dpexp", "hydra", "omegaconf", "mlflow", "pytorch_lightning")


def keep_error(error: Exception, output: Path) -> str:
    """What others may read of an error: a mistake in the configuration is a sentence of dpexp's own; of any other,
    whose text may quote a record, only type and place, while all of it is left in `error.txt` in the job's folder."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(error, ConfigError) and is_own(error) and type(root).__module__.partition(".")[0] in _OWN_WORDS:
        return " ".join(str(error).split())
    with suppress(OSError):  # that may be what went wrong
        output.mkdir(parents=True, exist_ok=True)
        (output / "error.txt").write_text("".join(traceback.format_exception(error)))
    places = [frame for frame in traceback.extract_tb(root.__traceback__) if "site-packages" not in frame.filename]
    where = f" in {Path(places[-1].filename).name}, line {places[-1].lineno}, {places[-1].name}" if places else ""
    return f"{type(root).__name__}{where}; see error.txt in the job's folder"
