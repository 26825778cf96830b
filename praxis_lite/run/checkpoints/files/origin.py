"""Which checkpoint is read, and the words in which it is refused."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.open_folder import own_names

_ADVICE = (
    "It is not as praxis_lite wrote it: use another step, or another copy of this one; "
    "`python -m praxis_lite.run.checkpoints ls JOB_LOG_DIR` shows which are whole."
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The folder of a checkpoint, and what to do where it cannot be used."""

    folder: Path
    advice: str = _ADVICE

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Names the folder, and adds the advice, in a ConfigError or an OSError from within."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(
                f"The checkpoint {self.folder} is refused: {error}. {self.advice}"
            ) from None
        except OSError as error:
            raise ConfigError(f"The checkpoint {self.folder} cannot be read ({error}).") from None

    def undecodable(self, error: ValueError, path: str = "an array") -> ConfigError:
        """Returns the error for an array that TensorStore cannot decode, with its words."""
        why = ascii(own_names(" ".join(str(error).split())))[1:500]
        return ConfigError(
            f"The checkpoint {self.folder}: {path} cannot be read ({why}). {self.advice}"
        )
