"""A JSON file of ours, read into a frozen pydantic model: what is wrong with it is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from redknot.errors import ConfigError

MAX_BYTES = 2**26  # the head table of the largest model has 0.2 MB
_Model = TypeVar("_Model", bound=BaseModel)


class Frozen(BaseModel):
    """Data that is checked once, when it is made; a key that nobody reads is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read_json(path: Path, what: str, kind: type[_Model], context: dict[str, Any] | None = None) -> _Model:
    """The model in a file; ConfigError, "``what`` ``path``: ...", names the field that is wrong.

    ``context`` goes to the model's validators.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{what} {path}: more than {MAX_BYTES} bytes, which none has")
        return kind.model_validate_json(data.decode("utf-8"), context=context)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path}: not readable ({error})") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")  # pydantic's, in front of the messages of validators
        raise ConfigError(f"{what} {path}: {where + ': ' if where else ''}{message}") from None
