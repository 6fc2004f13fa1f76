"""What a server is told when it is started."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Addresses, names and limits, checked where they are used. How the model is loaded is not among them."""

    model: str
    """A file, a registered name or a repository, as the command line was given it."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    served_model_name: str | None = None
    """What clients call the model; None takes it from `model`."""
    stores: tuple[str, ...] = ()
    """Tiers of the store, fastest first, each as `prolepsis.store.open_tiers` reads it; none keeps no store."""
    store_predictor: str = "auto"
    """What codes stored segments."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Without one anybody may ask."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the server goes by, besides those of the loopback."""
    cors_origins: tuple[str, ...] = ()
    """Whose pages may use the server from a browser, as `https://chat.example.com`; "*" is everybody's."""
    max_body: int = 4 << 20
    """Bytes."""
    max_header: int = 16 << 10
    """Bytes of a request's first line and headers."""
    max_connections: int = 256
    header_timeout: float = 10.0
    """Seconds for a request's first line and headers ..."""
    body_timeout: float = 30.0
    """... and for its body."""
    send_timeout: float = 60.0
    """Seconds that a client may stop reading its answer."""
    keep_alive_timeout: int = 75
    """Seconds that a connection may idle; longer than the 60 of common proxies."""
    request_timeout: float = 600.0
    """Seconds from the headers of a POST to the end of the answer."""
    max_queue: int = 256
    """Sequences that may wait beside those that run."""
    max_sequences: int = 128
    """Of one request: prompts times `n` or `best_of`."""
    drain_timeout: float = 30.0
    """Seconds that open requests have once the server was told to end."""
    log_json: bool = False
    log_prompts: bool = False
    """Whether bodies of requests are logged."""
