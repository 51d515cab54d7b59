"""The beginning of a text, as ``blockscale quantize --calibrate`` takes it."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockscale.cli import calibrating


@pytest.mark.parametrize("per_token", [1, 4, 50])
def test_no_more_of_a_text_is_tokenized_than_its_tokens_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, per_token: int
):
    monkeypatch.setattr(calibrating, "LENGTH", 4)
    monkeypatch.setattr(calibrating, "SEQUENCES", 8)
    words = [f"{i:0{per_token}d}"[-per_token:] for i in range(1000)]
    (tmp_path / "text").write_text("".join(words))
    seen = []

    def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
        assert return_tensors == "pt"
        seen.append(len(text))
        starts = range(0, len(text), per_token)
        return SimpleNamespace(
            input_ids=torch.tensor([[int(text[i : i + per_token]) for i in starts]])
        )

    found = calibrating.first_tokens(tokenizer, tmp_path / "text")
    assert found.tolist() == [int(word) for word in words[:32]]
    assert seen[-1] <= 2 * max(8 * 32, per_token * 36)


def test_a_short_text_is_taken_whole(tmp_path: Path):
    (tmp_path / "text").write_text("1234")

    def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[int(c) for c in text]]))

    assert calibrating.first_tokens(tokenizer, tmp_path / "text").tolist() == [1, 2, 3, 4]


def test_what_is_no_text(tmp_path: Path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(ValueError, match=r"calibrate: .*text.gz is no text in UTF-8 .*plain text"):
        calibrating.first_tokens(None, tmp_path / "text.gz")
