"""Where coded segments live."""

from prolepsis.store.session_file import open_session, replace_file, require_writable

__all__ = ["open_session", "replace_file", "require_writable"]
