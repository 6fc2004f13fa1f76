"""Where coded segments live."""

from prolepsis.store.disk_tier import DiskTier
from prolepsis.store.files import BusyError, lock_file, replace_file, require_writable
from prolepsis.store.memory_tier import MemoryTier
from prolepsis.store.open_tiers import open_tiers
from prolepsis.store.session_file import append_session, open_session
from prolepsis.store.tier import PinningTier, Tier, Usage
from prolepsis.store.tiers import Found, Located, Stored, Tiers
from prolepsis.store.watched_tier import TierStatistics

__all__ = [
    "BusyError",
    "DiskTier",
    "Found",
    "Located",
    "MemoryTier",
    "PinningTier",
    "Stored",
    "Tier",
    "TierStatistics",
    "Tiers",
    "Usage",
    "append_session",
    "lock_file",
    "open_session",
    "open_tiers",
    "replace_file",
    "require_writable",
]
