"""Check every entry of a cache, as a look-up would."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from . import cache, flock
from .artifact import DEPENDENCIES
from .gc import list_entries
from .lock import locks_directory


@dataclass(frozen=True)
class Fault:
    """An entry that cannot be used: why, and what was done about it."""

    directory: Path
    fault: str
    done: str = ""

    def as_json(self) -> dict[str, str]:
        """Return it as plain JSON values."""
        return {"directory": str(self.directory), "fault": self.fault, "done": self.done}


@dataclass
class Verified:
    """What is in a cache: how many entries are good, which are damaged, and which were compiled from other headers."""

    num_good: int = 0
    damaged: list[Fault] = field(default_factory=list)
    stale: list[Fault] = field(default_factory=list)


def verify_cache(root: Path, *, repair: bool) -> Verified:
    """Verify size, digest and headers of every entry; with ``repair`` damaged ones are moved to quarantine.

    An entry without a list of headers is one of a wheel, which is matched by source alone.
    """
    found = Verified()
    for entry in list_entries(root):
        try:
            _verify(entry.directory)
        except FileNotFoundError:
            continue
        except cache.StaleEntry as fault:
            found.stale.append(Fault(entry.directory, str(fault)))
        except cache.EntryFault as fault:
            found.damaged.append(Fault(entry.directory, str(fault), _repair(root, entry.directory) if repair else ""))
        else:
            found.num_good += 1
    return found


def _verify(directory: Path) -> None:
    provenance = cache.read_provenance(directory)
    library = provenance["library"]
    cache.check_library(directory / library["name"], library["size"], library["sha256"])
    if (directory / DEPENDENCIES).exists() or "built" in provenance:
        cache.check_dependencies(directory, provenance)


def _repair(root: Path, directory: Path) -> str:
    """Quarantine a damaged entry under its lock, unless it was replaced meanwhile; returns what was done."""
    path = locks_directory(root) / f"{directory.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = flock.lock_file(path)
    except flock.Busy:
        return "it is being built again"
    except OSError as error:
        return f"it stays, because the cache cannot be locked ({error.strerror})"
    try:
        _verify(directory)
    except FileNotFoundError:
        return "it is gone"
    except cache.EntryFault as fault:
        return cache.move_to_quarantine(root, directory, fault)
    finally:
        flock.release(handle)
    return "it was built again meanwhile"
