"""Model folders made by strangers hold regular files of known names; no link of theirs leads to other files."""

import os
import socket
from pathlib import Path

import pytest

from luffy.config.model import copy_model_files, model_files
from luffy.errors import DataError

SECRET = '{"key": "canary"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.json").write_text(SECRET)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "own.jinja").write_text("{{ secret }}")
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text("{}")
    return given


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


ADAPTER, OUT = "adapter/adapter_config.json", "is a link out of the folder"
MADE = [  # a name in the folder, what a link of that name leads to or what makes something else of it, and the reason
    ("notes.json", "../secret.json", f"{OUT}, to .*secret.json"),
    ("notes.json", "/dev/zero", f"{OUT}, to /dev/zero"),
    ("model.safetensors", "/dev/zero", OUT),
    ("chat_template.jinja", "/etc/passwd", OUT),
    ("additional_chat_templates", "../private", f"own.jinja {OUT}"),
    (ADAPTER, "../../secret.json", OUT),
    ("notes.json", "notes.json", "is a link that leads nowhere"),
    ("notes.json", "gone.json", "is nothing"),
    ("notes.json", os.mkfifo, "is a pipe, and a model folder has regular files"),
    ("LICENSE", os.mkfifo, "is a pipe"),
    ("notes.json", a_socket, "is a socket, and a model folder has regular files"),
    ("notes.json", lambda path: os.truncate(path.touch() or path, 1 << 40), "has 1099511627776 bytes, and a file"),
]


@pytest.mark.parametrize(("name", "make", "reason"), MADE)
def test_what_leads_out_of_a_model_folder_or_has_no_end_is_refused(folder, monkeypatch, name, make, reason):
    monkeypatch.chdir(folder)  # the path of a socket has to be short
    if callable(make):
        make(Path(name))
    else:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(make)
    with pytest.raises(DataError, match=reason) as caught:
        copy_model_files(folder, folder.parent / "out", "model.path")
    assert str(caught.value).startswith("model.path: ") and "\n" not in str(caught.value)
    assert not (folder.parent / "out").exists()


def test_files_of_other_names_are_left_alone(folder: Path) -> None:
    (folder / "README.md").symlink_to("/etc/passwd")
    (folder / "data").symlink_to(folder.parent)
    (folder / "own.py").write_text("")
    os.mkfifo(folder / "pipe")
    assert list(model_files(folder, "model.path")) == ["config.json"]


def test_links_within_the_folder_and_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "models--own--model"
    snapshot, blob, other = hub / "snapshots" / "1", hub / "blobs" / "ab", hub.parent / "models--b" / "blobs" / "c"
    for file in (blob, other):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/ab")
    (snapshot / "same.json").symlink_to("config.json")
    (tmp_path / "named").symlink_to(snapshot)
    assert model_files(tmp_path / "named", "model.path") == {"config.json": blob, "same.json": blob}
    (snapshot / "notes.json").symlink_to("../../../models--b/blobs/c")
    with pytest.raises(DataError, match="is a link out of the folder"):
        model_files(snapshot, "model.path")
