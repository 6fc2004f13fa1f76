"""/metrics for Prometheus. Where something means what it does in vLLM it has vLLM's name, with the prefix `prolepsis:`.

Labels have few values: tiers, states and reasons, never anything of a request, a key or a session.
"""

import asyncio
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from prolepsis.errors import ProlepsisError
from prolepsis.serve.answer_counts import AnswerCounts
from prolepsis.serve.live import Live, View
from prolepsis.serve.metric_families import answers_family, families

router = APIRouter()
_PATIENCE_S = 5.0  # for the engine to end a pass; Prometheus gives up after 10


class Metrics(Collector):
    """The metrics of one server, in a registry of their own."""

    def __init__(self, live: Live, answers: AnswerCounts) -> None:
        self._live, self._answers = live, answers
        self._view: View | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    async def refresh(self) -> None:
        """Have the next scrape tell of now; nothing of the engine where it does not answer."""
        self._view = None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._view = await self._live.view()
        except (TimeoutError, ProlepsisError):
            return

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield answers_family(self._answers.counts)
        if self._view is not None:
            yield from families(self._view)


def _metrics(request: Request) -> Metrics:
    found: Metrics = request.app.state.metrics
    return found


@router.get("/metrics")
async def metrics(request: Request, metrics: Annotated[Metrics, Depends(_metrics)]) -> Response:
    """Everything there is to count, as text."""
    await metrics.refresh()
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(metrics.registry), media_type=content_type)
