"""Where coded segments live."""

from prolepsis.store.files import BusyError, lock_file, replace_file, require_writable
from prolepsis.store.session_file import append_session, open_session

__all__ = ["BusyError", "append_session", "lock_file", "open_session", "replace_file", "require_writable"]
