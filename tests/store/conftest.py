"""What tests of several tiers share."""

from collections.abc import Iterator

import pytest
from s3_server import S3Server


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server with a bucket named "bucket", which clients find by the environment. Tests leave entries in it."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    _s3_server.put("bucket")
    return _s3_server
