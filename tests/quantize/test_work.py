"""The work directory: one process at a time, and nothing of others is thrown away."""

import json
from pathlib import Path

import numpy as np
import pytest

from prolepsis.errors import InputError
from prolepsis.quantize.stored import Stored
from prolepsis.quantize.work import work_directory


def test_nobody_else_works_there_meanwhile(tmp_path: Path) -> None:
    place = tmp_path / "made.part"
    with work_directory(place, {"bits": 4}, False) as work:
        work.made.write_bytes(b"done")
        for manifest, restart in (({"bits": 4}, False), ({"bits": 3}, True)):
            with (
                pytest.raises(InputError, match="another process is at work there"),
                work_directory(place, manifest, restart),
            ):
                pass
        assert work.made.read_bytes() == b"done"
    with work_directory(place, {"bits": 3}, True) as work:
        assert not work.made.exists()
        assert json.loads((place / "manifest.json").read_text()) == {"bits": 3}
        work.remove()
    assert not place.exists()


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    place = tmp_path / "made.part"
    with work_directory(place, {"bits": 4}, False):
        pass
    for damage in ("{", "[]", ""):
        (place / "manifest.json").write_text(damage)
        with (
            pytest.raises(InputError, match=r"manifest\.json is damaged; add --restart"),
            work_directory(place, {"bits": 4}, False),
        ):
            pass
    with work_directory(place, {"bits": 4}, True):
        pass


@pytest.mark.parametrize("names", [["layer-00000"], ["manifest.json", "letter.txt"]])
@pytest.mark.parametrize("restart", [False, True])
def test_what_is_none_of_a_jobs_stays(names: list[str], restart: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with (
        pytest.raises(InputError, match=f"holds something else .{names[-1]}"),
        work_directory(tmp_path, {}, restart),
    ):
        pass
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names)


def test_damaged_work_is_told(tmp_path: Path) -> None:
    states = np.ones((2, 3, 4), np.float32)
    with work_directory(tmp_path / "made.part", {}, False) as work:
        work.keep_layer(0, [Stored.of("weight", np.arange(8, dtype=np.int32))], [{"part": "attn_q"}], states)
        work.keep_errors(0, {"attn_q": [1.0]}, states)
        assert work.layers(1)[1] == [{"part": "attn_q"}]
        np.testing.assert_array_equal(work.hidden(1), states)
        for name, read in (
            ("layer-00000", lambda: work.layers(1)),
            ("errors-00000", lambda: work.errors(1)),
            ("hidden-1.npy", lambda: work.hidden(1)),
        ):
            file = work.path / name
            whole = file.read_bytes()
            for length in (0, 5, len(whole) // 2, len(whole) - 1):
                file.write_bytes(whole[:length])
                with pytest.raises(InputError, match=f"{name} is damaged; add --restart"):
                    read()
            file.write_bytes(whole)
            read()
