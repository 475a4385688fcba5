"""docs/api.md: it lists the public names, and each has a first sentence."""

import pytest

import pass_ext

pytest.importorskip("transformers")

from support.paths import ROOT

from tools import api


def test_the_page_is_what_the_names_say():
    assert api.check(ROOT) is None, "run python -m tools.api"


def test_the_check_sees_a_change(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / api.PAGE).write_text(api.page().replace("temperature", "warmth", 1))
    assert api.check(tmp_path) == "docs/api.md"


@pytest.mark.parametrize("name", api.names_of(pass_ext))
def test_every_public_name_can_be_had_and_says_what_it_is(name):
    value = getattr(pass_ext, name)
    assert name in dir(pass_ext)
    if callable(value):
        assert len(api.first_paragraph(value)) > 10 and api.first_paragraph(value)[-1] in ".:", name


def test_signatures_are_calls():
    def short(a, *, b=1): ...

    def long(first, second, *rest, third="a" * 60, fourth=None, **others): ...

    assert api.signature("short", short) == "short(a, *, b=1)"
    lines = api.signature("long", long).splitlines()
    assert lines[0] == "long(" and lines[-1] == ")" and "    *rest," in lines and "    **others," in lines
    assert "    *," not in lines, "after *rest every argument is passed by name"
