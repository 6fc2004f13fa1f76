"""Where coded segments live."""

from prolepsis.store.session_file import BusyError, append_session, open_session, replace_file, require_writable

__all__ = ["BusyError", "append_session", "open_session", "replace_file", "require_writable"]
