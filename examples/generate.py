"""Complete several prompts at once, and get the same tokens as one at a time.

python examples/generate.py [MODEL]
"""

import sys

from prolepsis import LLM, SamplingParams

PROMPTS = ["The KV cache is", "Paris is the capital of", "1, 2, 3, 4,"]


def main(model: str) -> None:
    """Sample with a seed: a completion is a function of the model, its own prompt, the parameters and the seed."""
    llm = LLM(model, max_context=512)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16)
    together = llm.generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    same = [c.token_ids for c in alone] == [c.token_ids for c in together]
    print(f"the same tokens alone and together: {same}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2:135m"]))
