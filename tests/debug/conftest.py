"""Pages of watches are drawn in those tests alone that look at them: three seconds each."""

from __future__ import annotations

import pytest

from blockscale.debug import watch_report


@pytest.fixture
def pictures() -> None:
    """For tests that look at pictures."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        for name in ("heat_map", "histograms"):
            monkeypatch.setattr(watch_report, name, lambda *given: None)
        monkeypatch.setattr(watch_report, "_picture", lambda figure, alt: alt)
