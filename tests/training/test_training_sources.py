"""Python sources as text: every file once, and none of a held-out package to learn from."""

from __future__ import annotations

import sys

import pytest

from blockscale import training
from blockscale.training import Corpus, Text, choose_text, python_sources, read_text

FILES = 40  # packages


def package(name, size=300):
    return {f"{name}/__init__.py": f"# {name}\n".encode() * (size // (len(name) + 3))}


@pytest.fixture
def site(tmp_path):
    """A site-packages folder of small packages and a large one."""
    files = {"large/a.py": b"# large a\n" * 4000, "large/sub/b.py": b"# large b\n" * 100}
    for i in range(FILES):
        files |= package(f"package{i}")
    files |= {
        "module.py": b"# a module of its own\n",
        "large/data.txt": b"no source",
        "package0.dist-info/RECORD": b"no source",
    }
    write(tmp_path / "site-packages", files)
    return tmp_path / "site-packages"


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def documents(part):
    return set(part.split(b"\0"))


def test_every_file_is_in_one_part(site):
    text = python_sources([site])
    files = {path.read_bytes() for path in site.rglob("*.py")}
    train, validation = documents(text.train), documents(text.validation)
    assert train | validation == files
    assert not train & validation
    assert text.source == f"Python sources of {FILES + 2} packages"


def test_packages_are_not_cut(site):
    """Some small packages are held out, whole; the large one is learnt from."""
    text = python_sources([site])
    held_out = text.held_out.removeprefix("packages ").split(", ")
    patterns = [pattern for name in held_out for pattern in (f"{name}.py", f"{name}/**/*.py")]
    paths = [path for pattern in patterns for path in site.glob(pattern)]
    assert documents(text.validation) == {path.read_bytes() for path in paths}
    assert "large" not in held_out
    assert len(text) / 20 <= len(text.validation) < len(text) / 10


def test_the_split_is_that_of_names(site, tmp_path):
    """Made anew, elsewhere, in another order: the same text."""
    text = python_sources([site])
    for path in sorted(site.rglob("*.py"), reverse=True):
        name = path.relative_to(site).as_posix()
        write(tmp_path / "other", {name: path.read_bytes()})
    assert python_sources([tmp_path / "other"]) == text
    assert python_sources([site]) == text


def test_copies_of_what_is_held_out_are_left_out(site):
    text = python_sources([site])
    copied = sorted(documents(text.validation))[0]
    write(site, {"large/_vendor/copy.py": copied})
    again = python_sources([site])
    assert copied in documents(again.validation)
    assert again == text


def test_a_package_in_two_folders_is_one(site, tmp_path):
    held_out = python_sources([site]).held_out.removeprefix("packages ").split(", ")[0]
    write(tmp_path / "more", {f"{held_out}/more.py": b"# more of it\n"})
    text = python_sources([site, tmp_path / "more"])
    assert b"# more of it\n" in documents(text.validation)


@pytest.mark.parametrize("files", [{}, {"one/a.py": b"# one\n" * 100}])
def test_too_few_packages(tmp_path, files):
    write(tmp_path, files)
    with pytest.raises(ValueError, match=r"data: .* none of them small enough .*name a text file"):
        python_sources([tmp_path])


def test_what_a_device_learns_from(site, monkeypatch):
    monkeypatch.setattr(training.sources, "_site_packages", lambda: [site])
    sources = python_sources([site])
    assert choose_text(None, "cpu") == read_text()
    assert choose_text(None, "cuda") == choose_text("site-packages", "cpu") == sources
    file = site / "module.py"
    assert choose_text(str(file), "cuda") == Text.of(file.read_bytes(), "module.py")


def test_folders_of_this_python(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    folders = training.sources._site_packages()
    assert folders[0] == site
    assert any((folder / "torch" / "__init__.py").exists() for folder in folders)
    assert len(set(folders)) == len(folders)
    monkeypatch.setattr(sys, "path", [])
    assert [(folder / "torch").is_dir() for folder in training.sources._site_packages()] == [True]


def test_a_corpus_of_both_parts(site):
    text = python_sources([site])
    corpus = Corpus(text, 16)
    assert bytes(corpus.train.tolist()) == text.train
    assert bytes(corpus.validation.tolist()) == text.validation
