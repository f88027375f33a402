"""The file of ``--settings``: a cluster's settings, in YAML."""

from pathlib import Path
from typing import Any

from lightning_qrl.errors import UserError, described


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a file.

    Raises:
        UserError: it cannot be read, or is no mapping; in one line, with the file.
    """
    import yaml
    from omegaconf import OmegaConf

    from lightning_qrl.plain_yaml import check_numbers, check_plain

    try:
        text = file.read_text(encoding="utf-8")
        kind = check_plain(text)
        if kind not in ("mapping", ""):
            raise UserError("it has no keys; write a setting a line, as batch: 32")
        values: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        check_numbers(values)
    except UnicodeDecodeError:
        raise UserError(f"--settings {file} cannot be read: it is no text") from None
    except OSError as error:
        raise UserError(f"--settings {file} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise UserError(f"{file}: {line}it is no YAML: {error.problem}") from None
    except Exception as error:  # OmegaConf raises many kinds
        raise UserError(f"{file}: {described(error)}") from None
    return {str(key): value for key, value in values.items()}
