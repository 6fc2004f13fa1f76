"""The default model against transformers in float32 on the same weights. Shows its figures with `pytest -s`."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from prolepsis import LLM
from prolepsis.errors import ProlepsisError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reference_texts import TEXTS


@pytest.fixture(scope="module")
def reference():
    """The script; what it imports takes seconds, which only whoever runs these tests should wait for."""
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason="the reference needs torch and transformers: pip install '.[test]'")
    return import_module("reference")


@pytest.fixture(scope="module")
def llm(reference):
    try:
        return LLM("smollm2:135m", max_context=2 * reference.PERPLEXITY_TOKENS)
    except ProlepsisError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def exact(reference, llm):
    return reference.load_reference(llm.path)


@pytest.mark.parametrize("language", TEXTS)
def test_next_token_distributions(reference, llm, exact, language):
    figures = reference.agreement(llm, exact, TEXTS[language])
    print(f"{language}: {figures}")
    assert figures.tokens >= 150
    assert figures.mean_kl < 1e-3, figures
    assert figures.max_kl < 0.01, figures
    assert figures.top1 > 0.97, figures


def test_perplexity_within_half_a_percent(reference, llm, exact):
    figures = reference.perplexities(llm, exact)
    print(figures)
    assert figures.tokens == reference.PERPLEXITY_TOKENS
    assert abs(figures.engine / figures.reference - 1) < 0.005, figures
