"""The same answer with drafts and without, and how many tokens each pass brought.

python examples/drafts.py [MODEL]
"""

import sys

from prolepsis import LLM, SamplingParams

CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth
"""


def main(model: str) -> None:
    """Ask for code to be repeated, which looks up drafts in the question."""
    params = SamplingParams(temperature=0, max_tokens=60)
    answers = []
    for draft in ("none", "ngram"):
        llm = LLM(model, max_context=512, draft=draft)
        prompt = llm.encode_chat([{"role": "user", "content": f"Repeat this code:\n\n{CODE}"}])
        [completion] = llm.generate([prompt], params)
        told = completion.statistics
        print(f"{draft}: {len(completion.token_ids)} tokens in {told.steps} passes")
        answers.append(completion.text)
    print("the same answer:", answers[0] == answers[1])


if __name__ == "__main__":
    main(*(sys.argv[1:2] or ["smollm2:135m"]))
