"""Sessions that leave the process: every bit comes back, and what follows is what would have followed."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from test_conversation import GREEDY, SEEDED, ask, assert_consistent, kv

from prolepsis import LLM, SamplingParams
from prolepsis.coding import profile
from prolepsis.coding.profile import measure
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.session import load_session, save_session, write_session
from prolepsis.engine.warm_up import warm_up
from prolepsis.errors import CapacityError, InputError, SegmentError
from prolepsis.kv.stored import arrays_of
from prolepsis.store import BusyError, append_session, open_session, replace_file

DATA = Path(__file__).parents[1] / "data"
LONG = "The KV cache of a long text fills several segments. " * 25


@pytest.fixture
def sequence(llm: LLM) -> Iterator[Sequence]:
    """A prefilled text of several segments."""
    sequence = llm.runner.new_sequence(llm.encode(LONG))
    llm.runner.prefill(sequence)
    assert sequence.num_cached > 512
    yield sequence
    sequence.release()


def continued(llm: LLM, sequence: Sequence, params: SamplingParams) -> list[int]:
    request = llm.new_request(sequence, params)
    for _ in llm.run(request):
        pass
    return request.completion.token_ids


# What a new process does with a session: says what it restored, and continues it.
RESUME = """
import json, sys
from dataclasses import replace
from prolepsis import LLM, SamplingParams
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.session import load_session, save_session
model, path, dtype, question, out = sys.argv[1:]
llm = LLM(model, kv_dtype=dtype)
saved = load_session(path, llm)
kv = llm.kv_cache.read(saved.sequence.table, 0, saved.sequence.num_cached)
open(path + ".kv", "wb").write(kv.tobytes())
chat = Conversation(llm, saved.messages, saved.sequence)
progress = []
answers = []
for params in (SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=1.5, seed=5, max_tokens=20)):
    answers.append("".join(d.text for d in chat.ask(question, params, lambda done, total: progress.append(total))))
save_session(out, llm, chat.sequence, chat.messages)
print(json.dumps({"answers": answers, "tokens": chat.sequence.tokens, "progress": progress}))
"""


def resume_elsewhere(model: Path, path: Path, dtype: str, question: str, out: Path) -> dict:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RESUME, str(model), str(path), dtype, question, str(out)]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_new_process_restores_every_bit_and_goes_on_alike(tiny: Path, tmp_path: Path, dtype: str) -> None:
    """Saved in the middle of a chat, resumed twice, growing; greedy and sampled answers are those of a chat that went
    on without a stop."""
    llm = LLM(tiny, kv_dtype=dtype)
    chat = Conversation(llm, [{"role": "system", "content": LONG}])
    ask(chat, "First", SEEDED)
    paths = [tmp_path / f"{i}.pkv" for i in range(3)]
    save_session(paths[0], llm, chat.sequence, chat.messages)
    for turn, question in enumerate(["Second", "Third"]):
        before = kv(llm, chat.sequence)
        elsewhere = resume_elsewhere(tiny, paths[turn], dtype, question, paths[turn + 1])
        assert Path(f"{paths[turn]}.kv").read_bytes() == before.tobytes()
        assert elsewhere["answers"] == [ask(chat, question, GREEDY), ask(chat, question, SEEDED)]
        assert elsewhere["tokens"] == chat.sequence.tokens
        assert max(elsewhere["progress"]) < 30  # restored, not computed again
    saved = load_session(paths[2], llm)
    assert saved.messages == chat.messages
    assert saved.sequence.tokens == chat.sequence.tokens
    assert np.array_equal(kv(llm, saved.sequence), kv(llm, chat.sequence))
    llm.kv_cache.check([saved.sequence.table, chat.sequence.table])


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_sessions_of_narrow_caches(tiny: Path, tmp_path: Path, dtype: str) -> None:
    """Saved, verified, restored, continued and added to, with their steps where they have some."""
    llm, path = LLM(tiny, kv_dtype=dtype), tmp_path / "s.pkv"
    sequence = llm.runner.new_sequence(llm.encode(LONG))
    for appended in (None, 100, 300):
        grow(llm, sequence, appended or 0)
        assert save_session(path, llm, sequence).appended == appended
        with open_session(path) as reader:
            assert reader.header.dtype == dtype
            reader.verify()
        restored = load_session(path, llm).sequence
        llm.kv_cache.check([sequence.table, restored.table])
        assert all(map(np.array_equal, arrays_of(kv(llm, restored)), arrays_of(kv(llm, sequence))))
        length = len(sequence.tokens)
        assert continued(llm, restored, SEEDED) == continued(llm, sequence, SEEDED)
        sequence.truncate(length)
        restored.release()
    with pytest.raises(SegmentError, match=f"holds a {dtype} cache and this one is bf16: use --kv-dtype {dtype}"):
        load_session(path, LLM(tiny))


def test_sessions_of_kivi4(tiny: Path, tmp_path: Path) -> None:
    """Whole blocks are saved and added to, the rest is pending; what follows is what would have followed."""
    llm, path = LLM(tiny, kv_dtype="kivi4"), tmp_path / "s.pkv"
    sequence = llm.runner.new_sequence(llm.encode("Less than a block"))
    llm.runner.prefill(sequence)
    first = save_session(path, llm, sequence)
    assert (first.tokens, first.appended) == (0, None)
    for length, appended in ((700, None), (750, 0), (1030, 384)):
        grow(llm, sequence, length - len(sequence.tokens))
        saved = save_session(path, llm, sequence)
        assert (saved.tokens, saved.appended) == (length // 128 * 128, appended)
        with open_session(path) as reader:
            assert (reader.header.dtype, reader.header.block_size) == ("kivi4", 128)
            reader.verify()
        restored = load_session(path, llm).sequence
        assert restored.tokens == sequence.tokens
        assert restored.num_cached == saved.tokens
        whole = [arrays_of(llm.kv_cache.read(each.table, 0, saved.tokens)) for each in (restored, sequence)]
        assert all(map(np.array_equal, *whole))
        assert continued(llm, restored, SEEDED) == continued(llm, sequence, SEEDED)
        sequence.truncate(length)
        restored.release()
        llm.kv_cache.check([sequence.table])
    sequence.release()
    with pytest.raises(SegmentError, match="holds a kivi4 cache and this one is bf16: use --kv-dtype kivi4"):
        load_session(path, LLM(tiny))


def test_a_chat_over_kivi4_goes_on_as_if_it_had_never_stopped(tiny: Path, tmp_path: Path) -> None:
    llm, path = LLM(tiny, kv_dtype="kivi4"), tmp_path / "s.pkv"
    chat = Conversation(llm, [{"role": "system", "content": LONG}])
    for question in ("First", "Second"):
        ask(chat, question, SEEDED)
        save_session(path, llm, chat.sequence, chat.messages)
        saved = load_session(path, llm)
        resumed = Conversation(llm, saved.messages, saved.sequence)
        before = len(chat.sequence.tokens), list(chat.messages)
        assert ask(resumed, "Then", GREEDY) == ask(chat, "Then", GREEDY)
        assert resumed.sequence.tokens == chat.sequence.tokens
        chat.sequence.truncate(before[0])
        chat.messages[:] = before[1]
        resumed.sequence.release()
    chat.sequence.release()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_cached_tokens_prove_the_restore(llm: LLM, sequence: Sequence, tmp_path: Path, params: SamplingParams) -> None:
    save_session(tmp_path / "s.pkv", llm, sequence)
    restored = load_session(tmp_path / "s.pkv", llm).sequence
    request = llm.new_request(restored, params)
    assert request.completion.cached_tokens == sequence.num_cached == len(sequence.tokens)
    seen: list[int] = []
    for _ in llm.run(request, lambda _, total: seen.append(total)):
        pass
    assert seen == [1]  # the last token again, for its logits
    assert request.completion.token_ids == continued(llm, sequence, params)
    restored.release()


def test_tokens_not_yet_computed_are_saved_too(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    sequence.tokens += [5, 6, 7]
    save_session(tmp_path / "s.pkv", llm, sequence)
    restored = load_session(tmp_path / "s.pkv", llm).sequence
    assert restored.tokens == sequence.tokens
    assert restored.num_cached == len(restored.tokens) - 3
    assert continued(llm, restored, GREEDY) == continued(llm, sequence, GREEDY)
    restored.release()


def test_a_chat_interrupted_in_its_answer_can_be_saved(llm: LLM, tmp_path: Path) -> None:
    chat = Conversation(llm)
    deltas = chat.ask("Hello", SEEDED)
    for _ in range(5):
        next(deltas)
    deltas.close()
    save_session(tmp_path / "s.pkv", llm, chat.sequence, chat.messages)
    saved = load_session(tmp_path / "s.pkv", llm)
    resumed = Conversation(llm, saved.messages, saved.sequence)
    assert ask(resumed, "Go on") == ask(chat, "Go on")
    chat.sequence.release()
    assert_consistent(resumed)
    resumed.sequence.release()


def test_saving_what_was_restored_gives_the_same_file(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    first, second = tmp_path / "1.pkv", tmp_path / "2.pkv"
    save_session(first, llm, sequence, [{"role": "user", "content": "?"}])
    saved = load_session(first, llm)
    save_session(second, llm, saved.sequence, saved.messages)
    saved.sequence.release()
    assert first.read_bytes() == second.read_bytes()


def written_whole(llm: LLM, sequence: Sequence, path: Path) -> bytes:
    """What a save to a new file gives."""
    path.unlink(missing_ok=True)
    assert save_session(path, llm, sequence).appended is None
    return path.read_bytes()


def assert_restores(llm: LLM, sequence: Sequence, path: Path) -> None:
    restored = load_session(path, llm).sequence
    assert restored.tokens == sequence.tokens
    assert np.array_equal(kv(llm, restored), kv(llm, sequence))
    restored.release()


def grow(llm: LLM, sequence: Sequence, count: int) -> None:
    sequence.tokens += [7 + i % 500 for i in range(count)]
    llm.runner.prefill(sequence)


def test_only_new_tokens_are_added(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    first, held = written_whole(llm, sequence, path), sequence.num_cached
    grow(llm, sequence, 100)
    report = save_session(path, llm, sequence, [{"role": "user", "content": "?"}])
    assert (report.appended, report.tokens, report.file_bytes) == (100, held + 100, path.stat().st_size)
    assert path.read_bytes().startswith(first)
    assert_restores(llm, sequence, path)
    with open_session(path) as reader:
        assert reader.saves == [held, held + 100]
    before = path.stat()
    assert save_session(path, llm, sequence, [{"role": "user", "content": "?"}]).appended == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert save_session(path, llm, sequence, [{"role": "user", "content": "!"}]).appended == 0
    saved = load_session(path, llm)
    assert saved.messages == [{"role": "user", "content": "!"}]
    saved.sequence.release()


def test_other_tokens_replace_the_file(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    for change in (
        lambda: sequence.truncate(sequence.num_cached - 1),  # fewer
        lambda: sequence.replace([*sequence.tokens[:300], 1, *sequence.tokens[301:]]),  # others in the middle
        lambda: sequence.replace([1, 2, 3]),
    ):
        written_whole(llm, sequence, path)
        change()
        llm.runner.prefill(sequence)
        assert save_session(path, llm, sequence).appended is None
        assert path.read_bytes() == written_whole(llm, sequence, tmp_path / "other.pkv")


@pytest.mark.parametrize("kind", ["foreign", "damaged", "version 1", "no trailer", "another dtype"])
def test_what_cannot_be_added_to_is_replaced(
    tiny: Path, llm: LLM, sequence: Sequence, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "s.pkv"
    data = written_whole(llm, sequence, path)
    if kind == "another dtype":
        other = LLM(tiny, kv_dtype="fp16")
        held = other.runner.new_sequence(sequence.tokens)
        other.runner.prefill(held)
        written_whole(other, held, path)
    spoiled = {
        "foreign": b"another file",
        "damaged": data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
        "version 1": (DATA / "golden_bf16.pkv").read_bytes(),
        "no trailer": data[:-10],
    }
    if kind in spoiled:
        path.write_bytes(spoiled[kind])
    grow(llm, sequence, 50)
    assert save_session(path, llm, sequence).appended is None
    assert path.read_bytes() == written_whole(llm, sequence, tmp_path / "other.pkv")


def test_a_file_in_too_many_pieces_is_written_whole_again(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    """Twice the segments it needs, and eight; never more, and seldom written whole."""
    path = tmp_path / "s.pkv"
    written_whole(llm, sequence, path)
    whole = 0
    for turn in range(60):
        grow(llm, sequence, 1 + turn % 5)
        whole += save_session(path, llm, sequence).appended is None
        with open_session(path) as reader:
            assert len(reader.segments) <= 2 * -(-sequence.num_cached // 256) + 8
    assert 1 <= whole <= 8
    assert_restores(llm, sequence, path)


def test_a_file_that_outgrew_its_profile_is_written_whole_again(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    sequence = llm.runner.new_sequence(llm.encode(LONG)[:100])
    llm.runner.prefill(sequence)
    written_whole(llm, sequence, path)
    grow(llm, sequence, 100)
    assert save_session(path, llm, sequence).appended == 100
    grow(llm, sequence, 1)
    assert save_session(path, llm, sequence).appended is None
    assert path.read_bytes() == written_whole(llm, sequence, tmp_path / "other.pkv")
    sequence.release()


def test_a_save_that_was_broken_off(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    """Refused; with `recompute` the save before it; and the next save adds to that one."""
    path = tmp_path / "s.pkv"
    first, tokens = written_whole(llm, sequence, path), list(sequence.tokens)
    grow(llm, sequence, 100)
    save_session(path, llm, sequence)
    second = path.read_bytes()
    path.write_bytes(second[:-1])
    with pytest.raises(SegmentError, match=rf"tokens 0-{len(tokens) - 1}.*--recompute"):
        load_session(path, llm)
    saved = load_session(path, llm, recompute=True)
    assert (saved.sequence.tokens, saved.refused) == (tokens, None)
    assert saved.torn is not None
    saved.sequence.release()
    assert save_session(path, llm, sequence).appended == 100
    assert path.read_bytes() == second
    path.write_bytes(first[: len(first) * 2 // 3])
    saved = load_session(path, llm, recompute=True)
    assert (saved.sequence.tokens, saved.messages) == (tokens[:256], [])
    assert saved.torn is not None
    assert saved.sequence.num_cached == 256
    saved.sequence.release()
    path.write_bytes(first[:2000])
    with pytest.raises(SegmentError, match="truncated"):
        load_session(path, llm, recompute=True)


def test_a_profile_kept_outside_must_be_given(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    """Even where lost KV may be computed again: nothing is lost."""
    path = tmp_path / "s.pkv"
    bits = kv(llm, sequence)
    profile = replace(measure(bits, "bf16", llm.rope, 0), embedded=False)
    other = replace(measure(bits[:, :, :300], "bf16", llm.rope, 0), embedded=False)
    save_session(path, llm, sequence, profile=profile)
    for given in (None, other):
        with pytest.raises(SegmentError, match=f"needs the profile {profile.fingerprint}"):
            load_session(path, llm, recompute=True, profile=given)
    restored = load_session(path, llm, profile=profile).sequence
    assert np.array_equal(kv(llm, restored), bits)
    restored.release()
    grow(llm, sequence, 10)
    assert save_session(path, llm, sequence, profile=profile).appended == 10
    assert save_session(path, llm, sequence, profile=other).appended is None
    assert save_session(path, llm, sequence).appended is None
    assert_restores(llm, sequence, path)


def test_a_session_can_be_written_to_a_pipe(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    file = BytesIO()
    report = write_session(file, llm, sequence)
    assert file.getvalue() == written_whole(llm, sequence, tmp_path / "s.pkv")
    assert report.file_bytes == len(file.getvalue())


def damaged(path: Path, at: float) -> bytes:
    """The file with one bit of its payload flipped, `at` of the way through."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)
    return bytes(data)


def test_damage_is_refused_and_nothing_is_kept(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    save_session(path, llm, sequence)
    damaged(path, 0.6)
    with pytest.raises(SegmentError, match=r"s\.pkv: segment 1 .*checksum differs"):
        load_session(path, llm)
    llm.kv_cache.check([sequence.table])


def test_damage_in_the_middle_can_be_computed_again(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    save_session(path, llm, sequence)
    damaged(path, 0.6)
    saved = load_session(path, llm, recompute=True)
    assert saved.refused is not None
    assert "segment 1" in saved.refused
    restored = saved.sequence
    assert (restored.num_cached, restored.tokens) == (256, sequence.tokens)
    assert continued(llm, restored, GREEDY) == continued(llm, sequence, GREEDY)
    assert np.array_equal(kv(llm, restored), kv(llm, sequence))
    restored.release()


def test_another_models_session_is_refused_by_name(tiny: Path, llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    path, other = tmp_path / "s.pkv", tmp_path / "other.gguf"
    save_session(path, llm, sequence)
    data = bytearray(tiny.read_bytes())
    data[-1000] ^= 1
    other.write_bytes(data)
    with pytest.raises(SegmentError, match=r"s\.pkv was saved with another model: file: '\w+' in the file, '\w+' here"):
        load_session(path, LLM(other))
    with pytest.raises(SegmentError, match="holds a bf16 cache and this one is fp16: use --kv-dtype bf16"):
        load_session(path, LLM(tiny, kv_dtype="fp16"))
    with pytest.raises(InputError, match="but the context holds 256; raise max_context"):
        load_session(path, LLM(tiny, max_context=256))


def test_no_room_in_the_cache_leaves_it_as_it_was(tiny: Path, llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    save_session(tmp_path / "s.pkv", llm, sequence)
    small = LLM(tiny, kv_memory=24 * 32 * llm.kv_cache.bytes_per_token)
    held = small.runner.new_sequence([5] * 300)
    small.runner.prefill(held)
    with pytest.raises(CapacityError):
        load_session(tmp_path / "s.pkv", small)
    small.kv_cache.check([held.table])


def test_a_session_without_a_computed_token_is_not_saved(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match="there is nothing to save"):
        save_session(path, llm, llm.runner.new_sequence([5]))
    assert path.read_bytes() == b"old"


def test_warming_up_leaves_nothing(llm: LLM, tiny: Path) -> None:
    warm_up(llm)
    tightest = LLM(tiny, max_context=2)
    warm_up(tightest)
    tightest.kv_cache.check([])


def test_warming_up_saves_a_session_large_enough_for_every_kernel_of_the_codec() -> None:
    module = importlib.import_module("prolepsis.engine.warm_up")
    assert module._VALUES >= profile._FEW_VALUES


def test_parameters_of_a_resumed_chat_are_free(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    save_session(tmp_path / "s.pkv", llm, sequence)
    one, two = (load_session(tmp_path / "s.pkv", llm).sequence for _ in range(2))
    flat = replace(SEEDED, temperature=30.0)
    assert continued(llm, one, flat) != continued(llm, two, replace(flat, seed=6))
    one.release()
    two.release()


def test_saving_again_mends_a_torn_file(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    """Also where there is nothing to add."""
    path = tmp_path / "s.pkv"
    save_session(path, llm, sequence)
    path.write_bytes(path.read_bytes() + b"SEGM and then the power failed")
    with pytest.raises(SegmentError), open_session(path):
        pass
    assert save_session(path, llm, sequence).appended == 0
    with open_session(path) as reader:
        reader.verify()
        assert reader.stop == sequence.num_cached


def test_two_processes_do_not_save_over_each_other(llm: LLM, sequence: Sequence, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    save_session(path, llm, sequence)
    with append_session(path), pytest.raises(BusyError, match="another process is saving to it"):
        save_session(path, llm, sequence)
    with pytest.raises(BusyError), append_session(path) as (_, writer):  # noqa: PT012 - raised as the block ends
        with replace_file(path) as other:
            other.write(b"other")
        writer.finish(b"lost")
    assert path.read_bytes() == b"other"
