"""What a server is told when it is started."""

from dataclasses import dataclass


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
    """Tiers of the store, fastest first, each as `prolepsis.store.tiers.open_tiers` reads it; none keeps no store."""
    store_predictor: str = "auto"
    """What codes stored segments."""
