"""Talk, save the conversation with its KV cache, come back to it and go on without reading it again.

python examples/chat_session.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from prolepsis import LLM, SamplingParams
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.session import load_session, save_session

PARAMS = SamplingParams(temperature=0, max_tokens=24)


def main(model: str) -> None:
    """Ask, save, forget, resume, ask again."""
    llm = LLM(model, max_context=1024)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "session.pkv")
        conversation = Conversation(llm)
        show(conversation, "What is 2 + 2?")
        save_session(path, llm, conversation.sequence, conversation.messages)
        in_cache = conversation.sequence.num_cached * llm.kv_cache.bytes_per_token
        conversation.sequence.release()
        print(f"saved {in_cache} bytes of KV cache in a file of {path.stat().st_size} bytes")

        saved = load_session(path, llm)
        print(f"restored {saved.sequence.num_cached} tokens")
        show(Conversation(llm, saved.messages, saved.sequence), "Which number was it?")


def show(conversation: Conversation, question: str) -> None:
    """Put a question and print the answer as it comes."""
    print(f"> {question}")
    for delta in conversation.ask(question, PARAMS):
        print(delta.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2:135m"]))
