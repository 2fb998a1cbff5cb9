"""A model is found in every layout a user may point at (E04, E05), without the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.hub import ModelNotFound, locate


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A hub cache with one repository: two commits, the branch main on the second."""
    repository = tmp_path / "models--org--name"
    for commit in ("aaa111", "bbb222"):
        (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bbb222\n")
    return tmp_path


def test_layouts(cache: Path, tmp_path: Path) -> None:
    repository = cache / "models--org--name"
    for model_id, revision, commit in [
        ("org/name", None, "bbb222"),
        ("org/name", "main", "bbb222"),
        ("org/name", "aaa111", "aaa111"),
        ("org/name", "aaa", "aaa111"),
        (str(repository), None, "bbb222"),
        (str(repository / "snapshots" / "aaa111"), None, "aaa111"),
    ]:
        assert locate(model_id, revision, str(cache)) == repository / "snapshots" / commit
    (tmp_path / "m.gguf").touch()
    assert locate(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_one_snapshot_without_a_branch_is_it(cache: Path) -> None:
    (cache / "models--single" / "snapshots" / "ccc").mkdir(parents=True)
    assert locate("single", None, str(cache)).name == "ccc"


@pytest.mark.parametrize(
    ("model_id", "revision", "message"),
    [
        ("org/other", None, "hf download org/other"),
        ("/no/where", None, "no folder /no/where"),
        ("org/name", "zzz", "it holds aaa111, bbb222"),
        ("a/b/c", None, "no folder a/b/c"),
    ],
)
def test_what_is_missing_is_named(cache: Path, model_id: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        locate(model_id, revision, str(cache))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelNotFound, match="give the folder"):
        locate(str(tmp_path / "x.bin"))
