"""Mutations that judge the suite: each operator changes what it names and nothing else, and what is drawn repeats."""

from pathlib import Path

import pytest

from tests.reliability.mutants import Drawing, Finder, is_change


def changed(source: str, operator: str) -> set[str]:
    """The sources that an operator makes."""
    found = [m for m in Finder("a.py", source.encode()).found if m.operator == operator]
    return {m.applied(source.encode()).decode() for m in found if is_change(m, source.encode())}


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("comparison", "a < b <= c", {"((a) <= (b) <= (c))", "((a) < (b) < (c))"}),
        ("comparison", "a is not b", {"((a) is (b))"}),
        ("arithmetic", "a - b * c", {"(a + b * c)", "a - (b / c)"}),
        ("arithmetic", "a += b", {"a -= b"}),
        ("arithmetic", "'x' + a", set()),
        ("boolean", "a and not b", {"(a or not b)", "a and (b)"}),
        ("constant", "f(True, 2, 'x')", {"f(False, 2, 'x')", "f(True, (2 + 1), 'x')"}),
        ("constant", "a['x'] == 'y'", {"a['x_'] == 'y'", "a['x'] == 'y_'"}),
        ("constant", "{'x': 'y'}", {"{'x_': 'y'}"}),
        ("condition", "b if a else c", {"b if (not (a)) else c"}),
        ("condition", "[x for x in y if x]", {"[x for x in y if (not (x))]"}),
        ("deletion", "a.b = c", {"pass"}),
        ("deletion", "a.b()", {"pass"}),
        ("deletion", "raise A('x' * 2)", {"pass"}),
        ("deletion", "a = c", set()),
        ("return", "def f(): return 1", {"def f(): return None"}),
        ("return", "def f(): return None", set()),
        ("slice", "a[b:]", {"a[(b) + 1:]", "a[(b) - 1:]"}),
        ("extreme", "min(a, b.max())", {"max(a, b.max())", "min(a, (b).min())"}),
        (
            "default",
            "def f(a, b=1, *, c=False): 0",
            {"def f(a, b=(1 + 1), *, c=False): 0", "def f(a, b=1, *, c=True): 0"},
        ),
        ("default", "class A:\n    b: int = 1", {"class A:\n    b: int = (1 + 1)"}),
    ],
)
def test_an_operator_changes_what_it_names(operator, source, expected):
    assert changed(source, operator) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""The least of 1 < 2."""',
        "a: Literal['x', 2]",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "__all__ = ['a']",
        "b = f'{a + 1}'",
        "print('a' if b else 1)",
        "if TYPE_CHECKING:\n    a = 1 < 2",
        "from . import a",
    ],
)
def test_what_is_written_for_people_and_for_type_checkers_stays(source):
    assert not Finder("a.py", source.encode()).found


def test_what_is_drawn_repeats_and_is_one_change_of_the_line_it_names(tmp_path):
    here = Path(__file__).parent
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_bytes((here / "mutants.py").read_bytes())
    (tmp_path / "package" / "b.py").write_bytes((here / "isolated.py").read_bytes())
    drawing, other = Drawing(tmp_path, "package"), Drawing(tmp_path, "package")
    drawn = drawing.drawn(3, 20)
    assert list(drawn.items()) == list(other.drawn(3, 20).items())
    assert list(drawn.items())[:10] == list(other.drawn(3, 10).items())
    assert drawn.keys() != other.drawn(4, 20).keys()  # negative control
    assert len(drawn) == 20
    for mutation in drawn.values():
        source = (tmp_path / mutation.file).read_bytes()
        after = mutation.applied(source).decode().splitlines()
        before = source.decode().splitlines()
        assert after[: mutation.line - 1] == before[: mutation.line - 1]
        removed = len(before) - len(after)
        assert after[mutation.last_line - removed :] == before[mutation.last_line :]
        assert after != before


def test_new_lines_leave_the_drawing_of_the_others(tmp_path):
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "a.py"
    module.write_bytes((Path(__file__).parent / "isolated.py").read_bytes())
    before = Drawing(tmp_path, "package").drawn(0, 30)
    module.write_text("b = 1 < 2\n" * 2 + module.read_text())
    after = Drawing(tmp_path, "package").drawn(0, 30)
    assert len(before.keys() - after.keys()) <= 2
    kept = before.keys() & after.keys()
    assert all((after[key].operator, after[key].line) == (before[key].operator, before[key].line + 2) for key in kept)
