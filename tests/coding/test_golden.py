"""Files written by earlier releases must decode for ever."""

import hashlib
from io import BytesIO
from pathlib import Path

import golden_kivi4
import msgspec
import pytest
from golden_twins import NAMES as TWINS
from golden_twins import profile_of
from golden_twins import written as written_by_a_twin
from make_golden import GOLDEN, IDS, NAMES, START, TOKENS, digest, outside_profile, written
from twin_samples import Model, Text, model

from prolepsis.coding import Profile, SessionReader, SessionStream

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize(
    ("dtype", "digest", "last"),
    [
        (
            "bf16",
            "5bf54d3466274df5a7ff202b5c03551b33215e7762a3f2cdde7f6199e674f6e6",
            [16162, 16288, 48859, 15765],
        ),
        (
            "fp16",
            "a92a4a38ad13365b89fd50e7e926aed1ac8abeeeba8bf96d799c82ca1eb57942",
            [14609, 46806, 47747, 14755],
        ),
    ],
)
def test_golden_file(dtype: str, digest: str, last: list[int]) -> None:
    with open(DATA / f"golden_{dtype}.pkv", "rb") as file:
        reader = SessionReader(file)
        kv = reader.read_all()
    assert kv.shape == (2, 2, 280, 1, 64)
    assert kv[1, 0, 279, 0, :4].tolist() == last
    assert hashlib.sha256(kv.tobytes()).hexdigest() == digest
    assert reader.metadata == b'{"golden":true}'
    assert reader.header.numerics == "golden/1"
    assert reader.header.tokens == {"bf16": "ids", "fp16": "hashes"}[dtype]


def test_golden_ids_and_hashes_belong_together() -> None:
    """The fp16 file keeps only hashes of the same tokens whose ids the bf16 file keeps."""
    with open(DATA / "golden_bf16.pkv", "rb") as bf16, open(DATA / "golden_fp16.pkv", "rb") as fp16:
        with_ids, hashed = SessionReader(bf16), SessionReader(fp16)
    assert with_ids.ids is not None
    assert with_ids.ids[:4].tolist() == [26535, 13558, 12316, 4909]
    assert hashed.ids is None
    for a, b in zip(with_ids.segments, hashed.segments, strict=True):
        assert a.hashes.tolist() == b.hashes.tolist()
    assert hashed.segments[0].hashes[0] == 13915086561242637193


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_and_predictor(name: str) -> None:
    data, profile = (GOLDEN / f"{name}.pkv").read_bytes(), outside_profile(name)
    digests = msgspec.json.decode((GOLDEN / "digests.json").read_bytes())
    reader = SessionReader(data, profile=profile)
    assert digest(reader.read_all()) == digests[name]
    assert f"{reader.header.predictor.removesuffix('/1')}_{reader.header.dtype}" == name
    assert (reader.saves, reader.metadata) == ([START + 21, START + TOKENS], b'{"golden":2}')
    assert [segment.count for segment in reader.segments] == [16, 5, 35]
    assert sum(segment.count for segment, _ in SessionStream(BytesIO(data), profile=profile)) == TOKENS


def test_kivi4() -> None:
    """Its values; and, which is no promise, the same bytes when they are coded again."""
    data = golden_kivi4.FILE.read_bytes()
    reader = SessionReader(data)
    kv = reader.read_all()
    assert golden_kivi4.digest(kv) == "eb1bc76b8139bbf9f612a2ee4f8d93c3042c363f0181e0062adf1840daa9e484"
    assert (reader.saves, [segment.count for segment in reader.segments]) == ([256, 384], [128, 128])
    assert reader.header.profile is not None
    profile = Profile.from_bytes(reader.header.profile, reader.header.geometry)
    assert profile.frequencies is not None
    assert golden_kivi4.written(kv, profile) == data


@pytest.mark.parametrize("name", NAMES)
def test_this_release_writes_the_same_bytes(name: str) -> None:
    """Not a promise of the format, whose writers may improve: a change that alters these bytes should mean to."""
    data = (GOLDEN / f"{name}.pkv").read_bytes()
    profile = outside_profile(name)
    reader = SessionReader(data, profile=profile)
    kept = reader.header.profile
    if kept is not None:
        profile = Profile.from_bytes(kept, reader.header.geometry, reader.header.predictor)
    assert profile is not None
    ids = IDS if reader.ids is None else reader.ids
    assert written(reader.read_all(), ids, profile, name.split("_")[0], reader.header.dtype) == data


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The model of the twins' files."""
    return model(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.mark.parametrize("name", TWINS)
def test_twins(small: Model, name: str) -> None:
    """Every value; and, which is no promise, the same bytes when they are coded again."""
    folder = DATA / "golden_twins"
    data, profile = (folder / f"{name}.pkv").read_bytes(), profile_of(name, small)
    reader = SessionReader(data, profile=profile)
    kv = reader.read_all()
    assert digest(kv) == msgspec.json.decode((folder / "digests.json").read_bytes())[name]
    assert [segment.count for segment in reader.segments] == [250, 6, 24]
    assert reader.ids is not None
    assert written_by_a_twin(Text(reader.ids, kv), profile) == data
