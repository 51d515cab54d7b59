"""Text, its two parts and the batches cut from it."""

from __future__ import annotations

import gzip
import os

import pytest
import torch

from blockscale.training import Corpus, Text, read_text


def test_the_packaged_text():
    text = read_text()
    assert len(text) == 935_822
    assert text.train.startswith(b"ALL'S WELL THAT ENDS WELL")
    assert max(text.train + text.validation) < 128


@pytest.mark.parametrize("content", [b"plain text", bytes(range(256)) * 4])
def test_any_file_gz_or_not(tmp_path, content):
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    for name in ("a.bin", "a.gz"):
        text = read_text(tmp_path / name)
        assert text.train + text.validation == content
        assert text.source == name


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"data: cannot read .*No such file.*name a readable"):
        read_text(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"data: cannot read .*directory"):
        read_text(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"data: .*empty is empty"):
        read_text(tmp_path / "empty")
    whole = gzip.compress(os.urandom(1000))
    for broken in (b"plain text", whole[:-9], whole[:20] + b"\xff" * 40 + whole[60:], b"\x1f\x8b"):
        (tmp_path / "broken.gz").write_bytes(broken)
        with pytest.raises(ValueError, match=r"data: .*broken\.gz is not a whole gzip file"):
            read_text(tmp_path / "broken.gz")


def test_the_tail_is_held_out():
    text = bytes(range(250)) * 4
    corpus = Corpus(Text.of(text, ""), 16)
    assert bytes(corpus.train.tolist()) == text[:900]
    assert bytes(corpus.validation.tolist()) == text[900:]


@pytest.mark.parametrize("size", [0, 1, 169])
def test_a_text_that_is_too_short(size):
    with pytest.raises(ValueError, match=r"data: .*bytes are too few; .*need 17 or more"):
        Corpus(Text.of(bytes(size), ""), 16)


def test_the_shortest_text():
    corpus = Corpus(Text.of(bytes(170), ""), 16)
    assert corpus.validation_starts(8).tolist() == [0]
    inputs, _ = corpus.sequences(corpus.validation, corpus.validation_starts(8))
    assert inputs.shape == (1, 16)
    inputs, _ = corpus.sequences(corpus.train, corpus.batches(50, 2, 0).flatten())
    assert inputs.shape == (100, 16)


def test_targets_are_the_next_bytes():
    corpus = Corpus(Text.of(bytes(i % 251 for i in range(4000)), ""), 16)
    inputs, targets = corpus.sequences(corpus.train, torch.tensor([0, 100, 3600 - 17]))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert targets[:, -1].tolist() == [16, 116, 3599 % 251]


def test_batches_depend_on_the_seed_alone(corpus):
    first = corpus.batches(5, 3, seed=1)
    torch.rand(7)  # the global generator is not theirs
    assert torch.equal(first, corpus.batches(5, 3, seed=1))
    assert not torch.equal(first, corpus.batches(5, 3, seed=2))
    assert first.shape == (5, 3)
    assert first.max() < len(corpus.train) - corpus.context


@pytest.mark.parametrize("sequences", [1, 7, 128, 10**6])
def test_validation_sequences_do_not_overlap(corpus, sequences):
    starts = corpus.validation_starts(sequences)
    assert len(starts) == min(sequences, (len(corpus.validation) - 1) // corpus.context)
    assert (starts.diff() >= corpus.context).all()
    assert starts[0] == 0
    assert starts[-1] + corpus.context < len(corpus.validation)
