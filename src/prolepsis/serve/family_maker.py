"""Families of metrics, each value with the labels that all have."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from prolepsis.engine.traffic import Distribution

PREFIX = "prolepsis:"


class FamilyMaker:
    """Makes families whose first label is the model's name, as vLLM's is."""

    def __init__(self, model: str) -> None:
        self._model = model

    def gauge(self, name: str, help_: str, value: float) -> Metric:
        """What may go up and down."""
        family = GaugeMetricFamily(PREFIX + name, help_, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def counter(self, name: str, help_: str, value: float) -> Metric:
        """What only goes up; its name gets "_total"."""
        family = CounterMetricFamily(PREFIX + name, help_, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def by(self, name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
        """A gauge for each value of a label."""
        family = GaugeMetricFamily(PREFIX + name, help_, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

    def counters(self, name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
        """A counter for each value of a label."""
        return self.table(name, help_, (label,), {(key,): value for key, value in values.items()})

    def table(self, name: str, help_: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """A counter for each of some values of several labels."""
        family = CounterMetricFamily(PREFIX + name, help_, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self._model, *key], value)
        return family

    def histogram(self, name: str, help_: str, values: Distribution) -> Metric:
        """A distribution, with bounds as labels."""
        family = HistogramMetricFamily(PREFIX + name, help_, labels=["model_name"])
        bounds = [*map(floatToGoString, values.bounds), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, accumulate(values.counts), strict=True)), values.total)
        return family
