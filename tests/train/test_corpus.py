"""Text that needs no download, and a user's own."""

import math
import os
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.train.data import corpus as corpus_module
from penstock.train.data.corpus import SKIPPED_FOLDERS, Corpus, load_corpus, unigram_entropy
from penstock.train.data.window_sampler import Windows
from penstock.train.setup.run_folder import is_of_a_run


def test_the_standard_library_is_real_text_of_some_size():
    corpus = load_corpus()
    text = bytes(corpus.tokens[:200_000]).decode(errors="replace")
    assert corpus.vocabulary == 256
    assert 5e6 < len(corpus.tokens) < 40e6
    assert "import" in text
    assert "def " in text


def test_folders_that_not_every_interpreter_has_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "a.py").write_text("kept")
    for folder in sorted(SKIPPED_FOLDERS):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b.py").write_text("dropped")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert bytes(load_corpus().tokens) == b"kept"


def test_folders_that_are_left_out_are_not_looked_into(tmp_path, monkeypatch):
    """Of installed packages there may be tens of thousands of files, and every process of a job loads the text."""
    for folder in ("json", "site-packages/torch", ".git/objects"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("text")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    real, seen = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(Path(path).name) or real(path))
    load_corpus()
    assert "json" in seen
    assert {"site-packages", "torch"}.isdisjoint(seen)
    load_corpus(str(tmp_path))
    assert {"site-packages", "torch"} <= set(seen)
    assert {".git", "objects"} & set(seen[-4:]) == set()


def test_a_library_that_cannot_be_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(DataError, match=r"cannot read Python standard library \(.*python.zip\): No such file"):
        load_corpus()


def test_a_folder_is_read_in_order_of_names_without_binaries(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    assert bytes(load_corpus(str(tmp_path)).tokens) == b"first\nsecond"


def test_a_text_file(tmp_path):
    (tmp_path / "x.txt").write_text("hé")
    corpus = load_corpus(str(tmp_path / "x.txt"))
    assert corpus.text
    assert bytes(corpus.tokens) == "hé".encode()


def test_token_arrays_are_mapped(tmp_path):
    np.save(tmp_path / "t.npy", np.array([5, 0, 700], dtype=np.uint16))
    np.array([5, 0, 700], dtype="<u2").tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        corpus = load_corpus(str(tmp_path / name))
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.tokens.tolist() == [5, 0, 700]
        assert corpus.vocabulary == 701
        assert not corpus.text


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), dtype=np.int32), r"int32 of shape \(2, 2\)"),
        (np.zeros(3, dtype=np.float32), "float32"),
        (np.array([1, -2]), "negative"),
        (np.zeros(0, dtype=np.int32), r"shape \(0,\)"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, array, message):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(DataError, match=message):
        load_corpus(str(tmp_path / "t.npy"))


def test_missing_unreadable_and_empty_places(tmp_path):
    with pytest.raises(DataError, match="there is no file or folder"):
        load_corpus(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text files"):
        load_corpus(str(tmp_path / "empty"))
    (tmp_path / "x.npy").write_text("not an array")
    with pytest.raises(DataError, match="cannot read tokens"):
        load_corpus(str(tmp_path / "x.npy"))


def test_unigram_entropy_by_hand():
    train, held_out = np.array([3, 1]), np.array([1, 1])
    # Counts plus one: 4 and 2 of 6.
    assert unigram_entropy(train, held_out) == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    uniform = np.full(256, 100)
    assert unigram_entropy(uniform, uniform) == pytest.approx(math.log(256))


def several_arrays(path):
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("empty.npy", lambda path: path.write_bytes(b""), "cannot read tokens"),
        ("zip.npy", several_arrays, "holds several arrays"),
        ("x" * 300, lambda path: None, "cannot read"),
    ],
)
def test_files_that_are_no_tokens(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(DataError, match=message):
        load_corpus(str(tmp_path / name))


def test_an_empty_path_is_not_this_folder():
    with pytest.raises(DataError, match="no file or folder ''"):
        load_corpus("")


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("text")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read '.*secret.txt': Permission denied"):
        load_corpus(str(tmp_path / "secret.txt"))


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    """Hidden ones are not looked into."""
    for folder in ("a", "b/secret", ".git"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a" / "text.txt").write_text("text")
    real = os.scandir

    def refuse(path):
        if Path(path).name in ("secret", ".git"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read '.*' \(.*b/secret\): Permission denied"):
        load_corpus(str(tmp_path))


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "program").write_bytes(b"\x7fELF\0\1")
    with pytest.raises(
        DataError, match=r"program' is not a text file: byte 4 is 0. Give text, or tokens in a .npy, .bin or .u32"
    ):
        load_corpus(str(tmp_path / "program"))
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(DataError, match="is neither a file nor a folder"):
            load_corpus(str(place))


def test_numbers_that_are_no_tokens(tmp_path):
    np.save(tmp_path / "t.npy", np.array([2**24 - 1, 0]))
    assert load_corpus(str(tmp_path / "t.npy")).vocabulary == 2**24
    np.save(tmp_path / "t.npy", np.array([2**40, 0]))
    with pytest.raises(DataError, match=f"holds {2**40}, but the numbers of tokens end below {2**24}"):
        load_corpus(str(tmp_path / "t.npy"))


def test_hidden_files_of_a_folder_are_left_out_and_tests_are_not(tmp_path):
    for place in ("a.txt", ".git/config", ".hidden.txt", "tests/b.txt"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(place)
    assert load_corpus(str(tmp_path)).tokens.tobytes() == b"a.txt\ntests/b.txt"


def test_the_records_of_runs_are_no_text(tmp_path):
    """Or training on a folder that holds its runs would find other text after a restart, wherever these lie."""
    for place in ("texts", "texts/2026-notes", "texts/runs/2026-11-22-030201-2bw-2x4", "2026-11-22-030201-2bw-2x4"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "a.txt").write_text(place)
    run = b"texts/runs/2026-11-22-030201-2bw-2x4"

    def found(data, out):
        return bytes(load_corpus(str(tmp_path / data), partial(is_of_a_run, tmp_path / out)).tokens)

    assert set(found("texts", "texts/runs").split(b"\n")) == {b"texts", b"texts/2026-notes"}
    assert set(found(".", ".").split(b"\n")) == {b"texts", b"texts/2026-notes", run}
    assert set(found("texts", ".").split(b"\n")) == {b"texts", b"texts/2026-notes", run}
    assert set(found("texts", "elsewhere").split(b"\n")) == {b"texts", b"texts/2026-notes", run}


def test_fingerprints_tell_texts_apart(tmp_path, monkeypatch):
    """Of a large corpus parts are read, from its beginning on."""
    monkeypatch.setattr(corpus_module, "_CHECKED_PARTS", 4)
    monkeypatch.setattr(corpus_module, "_CHECKED_PART", 8)
    found = set()
    texts = ["a" * 1000, "a" * 1001, "b" + "a" * 999, "a" * 250 + "b" + "a" * 749, "a" * 20]
    for text in texts:
        (tmp_path / "x.txt").write_text(text)
        found.add(load_corpus(str(tmp_path / "x.txt")).fingerprint)
    assert len(found) == len(texts)


def test_tokens_of_32_bits(tmp_path):
    np.array([5, 0, 70_000, 3], dtype="<u4").tofile(tmp_path / "t.u32")
    corpus = load_corpus(str(tmp_path / "t.u32"))
    assert (corpus.tokens.tolist(), corpus.vocabulary, corpus.text) == ([5, 0, 70_000, 3], 70_001, False)
    assert isinstance(corpus.tokens, np.memmap)
    (tmp_path / "cut.u32").write_bytes(bytes(7))
    with pytest.raises(DataError, match="7 bytes are no whole number of tokens of 4 bytes"):
        load_corpus(str(tmp_path / "cut.u32"))


@pytest.mark.parametrize("dtype", ["<u4", "<i8"])
def test_with_a_vocabulary_an_array_is_not_read_as_a_whole(tmp_path, monkeypatch, dtype):
    """Samples are checked instead: the first window is fine, the next has a token that is not."""
    tokens = np.arange(41, dtype=dtype) % 10
    tokens[15] = 10 if dtype == "<u4" else -1
    np.save(tmp_path / "t.npy", tokens)
    loaded = np.load
    reads = []

    class Watched(np.memmap):
        def min(self, *arguments, **named):
            reads.append(self.size)
            return super().min(*arguments, **named)

        def max(self, *arguments, **named):
            reads.append(self.size)
            return super().max(*arguments, **named)

    monkeypatch.setattr(np, "load", lambda *a, **k: loaded(*a, **k).view(Watched))
    corpus = load_corpus(str(tmp_path / "t.npy"), vocabulary=10)
    assert (reads, corpus.vocabulary) == ([], 10)
    windows = Windows(corpus, 10, 0.25, 0)
    assert windows._read(np.array([0]))[0].tolist() == [[*range(10)]]
    bad = tokens[15]
    with pytest.raises(DataError, match=f"holds the token {bad}, but model.vocabulary is 10"):
        windows._read(np.array([0, 1]))
    with pytest.raises(DataError, match=f"holds the token {bad}, but"):
        windows.count_tokens(10)


@pytest.mark.parametrize(("number", "said"), [(9, "9"), (17_640, "17,640"), (310_000, "0.3 M"), (12_345_678, "12.3 M")])
def test_the_size_of_a_small_corpus_is_not_nothing(number, said):
    assert Corpus("my.txt", np.zeros(number, np.uint8), 256, True).described == f"my.txt, {said} tokens"
