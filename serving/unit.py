"""The systemd unit of this machine: which file of keys its service reads."""

import re
from pathlib import Path

from recsys.config import Settings
from recsys.errors import ConfigError

UNITS = tuple(
    Path(folder) / "recsys.service"
    for folder in (
        "/etc/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
    )
)
_HOME = re.compile(r"^Environment=[\"']?RECSYS_HOME=([^\s\"']+)", re.MULTILINE)
_CONFIG = re.compile(r"^ExecStart=.*\s--config[ =](\S+)", re.MULTILINE)


def check_keys(place: Path, units: tuple[Path, ...] = UNITS) -> None:
    """Refuse a default file of keys that the installed service does not read.

    Args:
        place: the default file of this command, where no option or variable names another.
        units: places of the unit, of which the first that can be read counts.

    Raises:
        ConfigError: the service reads another file; the message names both.
    """
    for unit in units:
        try:
            text = unit.read_text(encoding="utf-8")
        except OSError:
            continue
        read = _keys_of(text)
        if read is not None and read != place.absolute():
            raise ConfigError(
                f"the service of {unit} reads its keys from {read}, and this command uses "
                f"{place.absolute()}; add --keys {read} (as the user of the service, or as root), "
                "or set RECSYS_HOME for another service"
            )
        return


def _keys_of(text: str) -> Path | None:
    """The file of keys of the service of a unit, as far as this user can read its settings."""
    home, config = _HOME.search(text), _CONFIG.search(text)
    try:
        section = Settings.load(Path(config.group(1))).values.get("serve") if config else None
    except ConfigError:
        section = None
    if isinstance(section, dict) and section.get("keys"):
        return Path(str(section["keys"]))
    return Path(home.group(1)) / "serving" / "keys.json" if home else None
