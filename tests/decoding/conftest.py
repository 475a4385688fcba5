"""A fixture of the tests of several loops."""

import pytest

from pass_ext.decoding.session.session import Session


@pytest.fixture
def rows_called(monkeypatch):
    """The rows of each call."""
    rows, forward = [], Session._forward
    monkeypatch.setattr(
        Session,
        "_forward",
        lambda self, trees, ids, *a, **k: rows.append(len(ids)) or forward(self, trees, ids, *a, **k),
    )
    return rows
