"""The documents that are made from the declarations are current."""

from __future__ import annotations

from pathlib import Path

from forerun.config import all_options
from forerun.usage import markdown, serve_help


def test_the_flags_page_is_current() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
    assert page.read_text() == markdown(all_options()), "run `python -m forerun.usage > docs/flags.md`"


def test_help_names_every_flag_but_the_hidden() -> None:
    text = serve_help("forerun serve", all_options())
    for option in all_options():
        assert all((flag in text) != option.declared.hidden for flag in option.flags), option.name
    assert max(len(line) for line in text.splitlines()) <= 160


def test_every_table_row_has_its_columns() -> None:
    rows = [line for line in markdown(all_options()).splitlines() if line.startswith("|")]
    counts = {line.replace("\\|", "").count("|") for line in rows}
    assert counts == {5, 6}
