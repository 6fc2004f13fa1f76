"""Where coded segments live."""

from prolepsis.store.session_file import append_session, open_session, replace_file, require_writable

__all__ = ["append_session", "open_session", "replace_file", "require_writable"]
