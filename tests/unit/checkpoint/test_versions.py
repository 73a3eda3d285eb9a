"""Folders of checkpoint versions, and the sizes of exported files."""

from mp_optim import checkpoint
from mp_optim.checkpoint.commit import begin, staging_of
from mp_optim.checkpoint.file_format import MANIFEST


def version(root, number):
    folder = root / f"version-{number}"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    return folder


def test_versions_are_sorted_by_number(tmp_path):
    made = [version(tmp_path, number) for number in (9, 10, 2, 100)]
    for name in ("version-x", "version-3.old", ".version-7.incomplete", "version-200"):
        (tmp_path / name).mkdir()  # None of these folders is a complete version.
    assert checkpoint.versions(tmp_path) == [made[2], made[0], made[1], made[3]]
    target = begin(tmp_path)
    assert target.name == "version-201"  # Version 200 is not complete, but its number is taken.
    assert not target.exists()
    assert staging_of(target).is_dir()
    assert not (tmp_path / ".version-7.incomplete").exists()
    assert (tmp_path / "version-3.old").is_dir()
