"""A model and a schedule small enough for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import training_ranks

from blockscale.training import Corpus, Settings, Text, read_text, started_ranks

CONTEXT = 32


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a comparison starts come from a process that has imported all."""
    monkeypatch.setattr(started_ranks.multiprocessing, "get_context", training_ranks.quick_context)


@pytest.fixture
def small() -> Settings:
    return Settings(
        steps=6,
        seeds=1,
        width=32,
        layers=1,
        heads=1,
        context=CONTEXT,
        batch=2,
        validations=2,
        validation_sequences=4,
        samples=2,
    )


@pytest.fixture(scope="session")
def text() -> Text:
    return Text.of(read_text().train[:50_000], "a part")


@pytest.fixture(scope="session")
def corpus(text: Text) -> Corpus:
    return Corpus(text, CONTEXT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of runs that are not finished."""
    (tmp_path / "unfinished").mkdir()
    return tmp_path
