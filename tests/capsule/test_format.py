"""A capsule comes back as it was, and whatever is damaged, foreign or newer is refused in words."""

from __future__ import annotations

import copy
import errno
import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftscope.capsule import read_capsule, replay, write_capsule
from driftscope.capsule.checks import GRID, PRODUCTS
from driftscope.capsule.format import JSON_NAME, TENSORS_NAME
from driftscope.errors import CapsuleError
from tests.capsule.sample import reseal, sample, saved

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
NEEDED = (*GRID, "advantages", "gg", *(f"view.model.{name}" for name in PRODUCTS), "hidden", "hidden_rows")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good, tmp_path):
    """A fresh copy to damage."""
    return shutil.copytree(good, tmp_path / "copy")


def same(a, b):
    """Whether two capsules are the same to the last bit."""
    tensors = a.tensors.keys() == b.tensors.keys() and all(
        v.dtype == b.tensors[k].dtype and torch.equal(v, b.tensors[k]) for k, v in a.tensors.items()
    )
    rest = ("record", "spec", "info", "measured", "findings", "alarm", "why", "notes", "texts")
    return tensors and all(getattr(a, name) == getattr(b, name) for name in rest)


def test_it_comes_back_as_it_was(tmp_path):
    made = sample()
    path = write_capsule(tmp_path / "c", made)
    assert sorted(p.name for p in path.iterdir()) == [JSON_NAME, TENSORS_NAME]
    for name in (path, path / JSON_NAME, path / TENSORS_NAME):
        assert same(read_capsule(name), made)


def test_tensors_that_share_memory(tmp_path):
    made = sample()
    both = torch.stack([made.tensors["old_logps"], made.tensors["sampling_logps"]])
    shared = {"old_logps": both[0], "sampling_logps": both[1], "ref_logps": both[0]}
    made = replace(made, tensors={**made.tensors, **shared})
    assert same(read_capsule(write_capsule(tmp_path / "c", made)), made)


def test_there_is_no_pickle_in_it(path):
    for file in path.iterdir():
        assert b"torch._utils" not in file.read_bytes()
    assert json.loads((path / JSON_NAME).read_text())["format"] == "driftscope-capsule"


def test_a_directory_without_a_capsule(tmp_path):
    for where in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CapsuleError, match=r"is no capsule: there is no capsule\.json"):
            read_capsule(where)


@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_a_file_is_missing(path, name):
    (path / name).unlink()
    with pytest.raises(CapsuleError, match=r"is no (complete )?capsule"):
        read_capsule(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": "other"}', "{" * 100_000, "\udcff", "[" * 9999])
def test_a_foreign_json(path, text):
    (path / JSON_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CapsuleError, match="capsule"):
        read_capsule(path)


def test_a_newer_schema(path):
    reseal(path, lambda document: document | {"schema": 2})
    with pytest.raises(CapsuleError, match="written by a newer Driftscope: upgrade"):
        read_capsule(path)


@pytest.mark.parametrize("schema", [0, None, "1", 1.5, True])
def test_no_schema_of_ours(path, schema):
    reseal(path, lambda document: document | {"schema": schema})
    if schema is True:  # JSON's true equals 1 in Python: nothing is misread
        return
    with pytest.raises(CapsuleError, match="damaged"):
        read_capsule(path)


@FUZZ
@given(data=st.data())
def test_truncated_anywhere(good, tmp_path, data):
    path = shutil.copytree(good, tmp_path / "t", dirs_exist_ok=True)
    file = path / data.draw(st.sampled_from([JSON_NAME, TENSORS_NAME]))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: data.draw(st.integers(0, size - 2))])  # the JSON ends with a newline
    with pytest.raises(CapsuleError, match=r"damaged|is no capsule"):
        read_capsule(path)


@FUZZ
@given(data=st.data())
def test_a_byte_flipped_anywhere(good, tmp_path, data):
    path = shutil.copytree(good, tmp_path / "f", dirs_exist_ok=True)
    file = path / data.draw(st.sampled_from([JSON_NAME, TENSORS_NAME]))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(bytes(content))
    try:
        found = read_capsule(path)
    except CapsuleError:
        return
    assert file.name == JSON_NAME and same(found, read_capsule(good))  # white space between two tokens


@pytest.mark.parametrize("name", NEEDED)
def test_a_tensor_is_missing(path, name):
    reseal(path, change_tensors=lambda tensors: tensors.pop(name))
    with pytest.raises(CapsuleError, match=f"lacks the tensors {name}|one of them is missing"):
        read_capsule(path)


@FUZZ
@given(data=st.data())
def test_tensors_of_another_shape_or_dtype(good, tmp_path, data):
    """Each is refused, or means the same to the replay; never a traceback."""
    path = shutil.copytree(good, tmp_path / "s", dirs_exist_ok=True)
    name = data.draw(st.sampled_from(sorted(read_capsule(good).tensors)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float16, torch.int64, torch.int8, torch.bool]))
    kind = data.draw(st.sampled_from(["cut", "longer", "flat", "scalar", "empty", "dtype"]))

    def change(tensors):
        old = tensors[name]
        tensors[name] = {
            "cut": lambda: old[1:].clone(),
            "longer": lambda: torch.cat([old, old]),
            "flat": lambda: old.reshape(-1)[None].clone(),
            "scalar": lambda: old.reshape(-1)[0].clone(),
            "empty": lambda: old[:0].clone(),
            "dtype": lambda: old.to(dtype),
        }[kind]()

    reseal(path, change_tensors=change)
    if replayed_or_refused(path) is None:
        return
    assert kind == "dtype" or name == "head.weight"  # a weight with other rows is another vocabulary


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("name", ["hidden", "hidden_grad", "head.weight", "old_logps", "sampling_logps", "advantages",
                                  "is_ratio", "gg", "view.model.uu", "reference.c"])  # fmt: skip
def test_a_value_that_is_not_finite_is_seen_and_not_fatal(path, name, value):
    def change(tensors):
        tensors[name].view(-1)[0] = value

    reseal(path, change_tensors=change)
    again = replay(read_capsule(path))
    recomputed = name.startswith(("gg", "view."))  # made again from the hidden states
    assert recomputed or not again.same


def replayed_or_refused(path):
    """The replay, or ``None`` where the capsule is refused in one line that names it."""
    said = None
    try:
        return replay(read_capsule(path))
    except CapsuleError as error:
        said = str(error)
    assert str(path) in said and "\n" not in said
    return None


def nodes(value, at=()):
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from nodes(child, (*at, key))


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.just(["x"]),
    st.just({"x": 1}),
)


@settings(FUZZ, max_examples=250)
@given(data=st.data())
def test_any_value_of_the_json_replaced(good, tmp_path, data):
    """A capsule that somebody wrote himself: refused in words or replayed, never a traceback."""
    path = shutil.copytree(good, tmp_path / "j", dirs_exist_ok=True)
    document = json.loads((path / JSON_NAME).read_text())
    part = data.draw(st.sampled_from(["spec", "measured", "record", "run", "findings", "alarm", "texts", "notes"]))
    at = (part, *data.draw(st.sampled_from(list(nodes(document[part])))))
    value = data.draw(ANY)

    def change(made):
        made = copy.deepcopy(made)
        holder = made
        for key in at[:-1]:
            holder = holder[key]
        holder[at[-1]] = value
        return made

    reseal(path, change)
    replayed_or_refused(path)


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(CapsuleError, match="No space left on device"):
        write_capsule(tmp_path / "c", sample())
    assert list(tmp_path.iterdir()) == []


def test_a_capsule_is_not_written_over(good, tmp_path):
    path = write_capsule(tmp_path / "c", sample())
    before = (path / JSON_NAME).read_bytes()
    with pytest.raises(CapsuleError, match="cannot be written"):
        write_capsule(tmp_path / "c", sample(seed=1))
    assert (path / JSON_NAME).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
