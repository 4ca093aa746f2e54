"""The table of models, the user's own over it, and the way from a word on the command line to a folder."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dgemma_local import registry
from dgemma_local.cli_flags import model_names
from dgemma_local.errors import ConfigError, UnknownModel
from dgemma_local.registry import FILES, Entry, find, resolve, table, user_file
from dgemma_local.ui.models import show_models

ROOT = Path(__file__).parents[2]
NAMES = [
    "demo",
    "demo-text",
    "demo-fp8",
    "demo-nvfp4",
    "26b-a4b-bf16",
    "26b-a4b-fp8",
    "26b-a4b-nvfp4",
    "26b-a4b-nvfp4-nvidia",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, so that the developer's own table is not seen; the current folder is empty too."""
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(home / "work")
    return home


def own(text: str | bytes) -> Path:
    path = user_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def unknown(name: str) -> UnknownModel:
    with pytest.raises(UnknownModel) as caught:
        resolve(name)
    assert caught.value.what.isprintable() and caught.value.fix.isprintable()
    return caught.value


def broken() -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        table()
    assert caught.value.what.isprintable() and caught.value.fix.isprintable()
    assert str(user_file()) in caught.value.what
    return caught.value


# ── the packaged table ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_packaged_table_is_whole() -> None:
    entries = table()
    assert list(entries) == NAMES
    for name, entry in entries.items():
        assert entry.name == name and entry.format in ("bf16", "fp8", "nvfp4")
        assert entry.licence == "Apache-2.0" and entry.note and entry.needs is not None
    for name in NAMES[4:]:
        entry = entries[name]
        assert entry.repository and entry.bytes and entry.needs and entry.folder is None
        assert "yet" not in entry.note
    for name in NAMES[:4]:
        assert entries[name].needs == 0 and entries[name].repository is None
    assert (entries["demo-fp8"].format, entries["demo-nvfp4"].format) == ("fp8", "nvfp4")
    assert {entry.files for entry in entries.values()} == {FILES}
    assert entries["demo"].folder == Path(registry.__file__).parent / "demo" / "models" / "sudoku"


def test_pinned_revisions_are_commits() -> None:
    pinned = {name: entry.revision for name, entry in table().items() if entry.revision}
    assert pinned.keys() == {"26b-a4b-bf16", "26b-a4b-nvfp4-nvidia"}
    assert all(len(revision) == 40 and int(revision, 16) for revision in pinned.values())


def test_a_wheel_carries_the_table_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    (tmp_path / "models.toml").write_text('[beside]\nfolder = "demo/models/sudoku"\n')
    assert table()["beside"].folder == tmp_path / "package" / "demo" / "models" / "sudoku"
    (tmp_path / "package" / "models.toml").write_text('[inside]\nrepository = "a/b"\n')
    assert list(table()) == ["inside"]


def test_no_torch_at_import() -> None:
    code = "import sys, dgemma_local.registry; sys.exit(bool({'torch', 'huggingface_hub'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


# ── the user's table ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_users_keys_win_and_the_rest_stays() -> None:
    own('[26b-a4b-bf16]\nfolder = "~/models/big"\nlicence = "mine"\n')
    entry = table()["26b-a4b-bf16"]
    assert entry.licence == "mine"
    assert entry.folder == Path.home() / "models" / "big"
    assert entry.repository == "google/diffusiongemma-26B-A4B-it" and entry.needs == 52.0


def test_another_repository_is_another_model() -> None:
    own('[26b-a4b-bf16]\nrepository = "me/tuned"\n')
    entry = table()["26b-a4b-bf16"]
    assert entry.repository == "me/tuned" and entry.revision is None and entry.bytes is None


def test_a_new_entry_and_a_folder_beside_the_table() -> None:
    path = own('[mine]\nfolder = "weights"\nneeds = 3\n')
    assert list(table()) == [*NAMES, "mine"]
    assert table()["mine"].folder == path.parent / "weights" and table()["mine"].needs == 3


def test_xdg_config_home(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_file() == home / ".config" / "dgemma" / "models.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/does/not/count")
    assert user_file() == home / ".config" / "dgemma" / "models.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    own('[mine]\nfolder = "/w"\n')
    assert (tmp_path / "xdg" / "dgemma" / "models.toml").is_file() and "mine" in table()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a]\nfolder = 'x'\nnote = oops\n", "line 3"),
        ("[a]\nfolder = 'x'\n[a]\n", "line 3"),
        ("[a]\nnote = '''never\nclosed\n", "line 3"),
        (b"[a]\nfolder = 'x'\nnote = '\xff'\n", "line 3"),
        ("a = 1\n", "'a' is not a table"),
        ("[a]\nnote = 'x'\n", "[a] has neither 'folder' nor 'repository'"),
        ("[a]\nfolder = 'x'\nspeed = 3\n", "[a] has an unknown key 'speed'"),
        ("[a.b]\nfolder = 'x'\n", "[a] has an unknown key 'b'"),
        ("[a]\nfolder = 3\n", "[a] folder = 3 is not one line of text"),
        ("[a]\nfolder = ' '\n", "is not one line of text"),
        ("[a]\nfolder = 'x'\nnote = 'a\\nb'\n".replace("'a\\nb'", '"a\\nb"'), "is not one line of text"),
        ("[a]\nfolder = 'x'\nfiles = 'x'\n", "[a] files = 'x' is not a list of file names"),
        ("[a]\nfolder = 'x'\nfiles = []\n", "is not a list of file names"),
        ("[a]\nfolder = 'x'\nfiles = ['x', 3]\n", "is not a list of file names"),
        ("[a]\nfolder = 'x'\nfiles = ['']\n", "is not a list of file names"),
        ("[a]\nfolder = 'x'\nbytes = 1.5\n", "[a] bytes = 1.5 is not a number from 0"),
        ("[a]\nfolder = 'x'\nbytes = true\n", "is not a number from 0"),
        ("[a]\nfolder = 'x'\nneeds = -1\n", "is not a number from 0"),
        ("[a]\nfolder = 'x'\nneeds = inf\n", "is not a number from 0"),
        ("[a]\nfolder = 'x'\nneeds = nan\n", "is not a number from 0"),
        ("[a]\nfolder = 'x'\nbytes = " + "9" * 5000 + "\n", "is not TOML"),
        ("[a]\nfolder = 'x'\nbytes = " + "9" * 400 + "\n", "is not a number from 0"),
        ("[a]\nfolder = 'x'\nneeds = 0x" + "f" * 9000 + "\n", "needs = … is not a number from 0"),
        ("['']\nfolder = 'x'\n", "'' is not a name"),
        ("[auto]\nfolder = 'x'\n", "[auto] has a name that means"),
        ('["a\\u001b[2J"]\nfolder = "x"\n', "is not a name"),
    ],
)
def test_a_broken_table_is_named_with_its_place(text: str | bytes, says: str) -> None:
    own(text)
    assert says in broken().what


def test_a_table_saved_with_a_byte_order_mark() -> None:
    own(b"\xef\xbb\xbf[mine]\nfolder = 'x'\n")
    assert "mine" in table()


def test_a_folder_too_long_for_a_path() -> None:
    own(f"[mine]\nfolder = '{'x' * 5000}'\nbytes = {2**63 - 1}\n")
    out = io.StringIO()
    show_models(table().values(), out)
    row = next(line for line in out.getvalue().splitlines() if line.startswith("mine "))
    assert row.split()[-3:] == ["-", "no", "-"]
    assert "is not there" in unknown("mine").what


def test_a_table_that_cannot_be_read() -> None:
    user_file().mkdir(parents=True)
    assert "cannot be read" in broken().what


def test_a_home_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert list(table()) == NAMES
    assert unknown("~/x").what == "no model and no folder is called '~/x'"


# ── from a word to a folder ───────────────────────────────────────────────────────────────────────────────────────


def test_a_name_with_a_folder(home: Path) -> None:
    (home / "big").mkdir()
    own('[mine]\nfolder = "~/big"\n')
    assert resolve("mine") == ("mine", home / "big")


def test_a_name_wins_over_a_folder_of_that_name(home: Path) -> None:
    (home / "big").mkdir()
    Path("mine").mkdir()
    own('[mine]\nfolder = "~/big"\n')
    assert resolve("mine") == ("mine", home / "big")
    assert resolve("./mine") == ("mine", Path("./mine"))


def test_a_folder(home: Path) -> None:
    (home / "weights").mkdir()
    assert resolve(str(home / "weights")) == ("weights", home / "weights")
    assert resolve("~/weights") == ("weights", home / "weights")
    assert resolve("../weights") == ("weights", Path("../weights"))
    assert resolve(".") == ("work", Path())


def test_a_downloaded_folder_called_like_its_repository() -> None:
    name = "google/diffusiongemma-26B-A4B-it"
    Path(name).mkdir(parents=True)
    assert resolve(name) == ("diffusiongemma-26B-A4B-it", Path(name))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("26b-a4b-bf16", "26b-a4b-bf16"),
        ("google/diffusiongemma-26B-A4B-it", "26b-a4b-bf16"),
        ("26b-a4b-fp8", "26b-a4b-fp8"),
        ("nvidia/diffusiongemma-26B-A4B-it-NVFP4", "26b-a4b-nvfp4-nvidia"),
    ],
)
def test_a_model_that_is_not_here_says_how_to_get_it(name: str, known: str) -> None:
    error = unknown(name)
    assert (error.what, error.fix) == (f"{known!r} is not on this machine", f"run `dgemma pull {known}`")


def test_a_copy_in_the_cache(home: Path) -> None:
    asked = []

    def cached(entry: Entry) -> Path | None:
        asked.append(entry.name)
        return home if entry.name == "26b-a4b-fp8" else None

    assert resolve("26b-a4b-fp8", cached) == ("26b-a4b-fp8", home)
    assert resolve("RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic", cached) == ("26b-a4b-fp8", home)
    with pytest.raises(UnknownModel):
        resolve("26b-a4b-nvfp4", cached)
    assert asked == ["26b-a4b-fp8", "26b-a4b-fp8", "26b-a4b-nvfp4"]
    own('[26b-a4b-fp8]\nfolder = "/no/such"\n')  # a folder of one's own is not replaced in silence
    with pytest.raises(UnknownModel, match="is not there"):
        resolve("26b-a4b-fp8", cached)


def test_a_repository_with_a_folder_of_ones_own(home: Path) -> None:
    own('[26b-a4b-fp8]\nfolder = "~"\n')
    assert resolve("RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic") == ("26b-a4b-fp8", home)


def test_a_repository_of_the_users(home: Path) -> None:
    own('[mine]\nrepository = "me/tuned"\nrevision = "v2"\nfiles = ["model.safetensors", "*.json"]\n')
    entry = table()["mine"]
    assert (entry.repository, entry.revision) == ("me/tuned", "v2")
    assert entry.files == ("model.safetensors", "*.json")
    assert unknown("mine").fix == "run `dgemma pull mine`"


def test_a_command_to_paste_does_only_what_it_says() -> None:
    own('["mine; rm -r x"]\nrepository = "me/tuned"\n')
    assert unknown("mine; rm -r x").fix == "run `dgemma pull 'mine; rm -r x'`"


def test_find() -> None:
    assert find("26b-a4b-fp8") == find("RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic") == table()["26b-a4b-fp8"]
    with pytest.raises(UnknownModel, match=r"no model is called '\./demo'") as caught:
        find("./demo")
    assert caught.value.fix == f"pick one of: {', '.join(NAMES)}"


def test_a_folder_of_the_table_that_is_gone() -> None:
    own('[mine]\nfolder = "/no/such"\n')
    assert unknown("mine").what == "the folder of 'mine' is not there: /no/such"


def test_a_file_instead_of_its_folder() -> None:
    Path("model.safetensors").write_bytes(b"")
    error = unknown("model.safetensors")
    assert "is not a folder" in error.what and "the folder that holds" in error.fix


@pytest.mark.parametrize("name", ["nope", "", " ", "a\0b", "x" * 5000, "~nobody-of-that-name/x", "line\nbreak"])
def test_neither_a_name_nor_a_folder(name: str) -> None:
    error = unknown(name)
    assert repr(name) in error.what
    assert error.fix == f"pick one of: {', '.join(NAMES)}; or give a folder"


def test_a_table_that_is_a_pipe_is_not_waited_for() -> None:
    user_file().parent.mkdir(parents=True)
    os.mkfifo(user_file())
    with pytest.raises(ConfigError, match="no regular file"):
        table()
    assert model_names("demo") == []
