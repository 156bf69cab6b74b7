import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.sample import PackUnit, Sample, dump_units, load_units


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    n = draw(st.integers(1, 6))
    token_columns = {}
    if draw(st.booleans()):
        token_columns["advantages"] = np.arange(n, dtype=np.float32)
    if draw(st.booleans()):
        token_columns["teacher"] = np.arange(2 * n, dtype=np.int64).reshape(n, 2)
    tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)), np.int32)
    return Sample(tokens, np.linspace(0, 1, n, dtype=np.float32), draw(st.sampled_from(["a", "b", ""])), token_columns)


def same(a: Sample, b: Sample) -> bool:
    arrays = [
        (a.tokens, b.tokens),
        (a.loss_weights, b.loss_weights),
        *((a.token_columns[k], b.token_columns[k]) for k in a.token_columns),
    ]
    return (
        a.source == b.source
        and a.token_columns.keys() == b.token_columns.keys()
        and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays)
    )


@given(st.lists(st.lists(samples(), min_size=1, max_size=3).map(tuple), max_size=5))
def test_units_survive_being_written_out(units: list[PackUnit]) -> None:
    again = load_units(dump_units(units))
    assert [len(a) for a in again] == [len(a) for a in units]
    assert all(same(s, t) for a, b in zip(units, again, strict=True) for s, t in zip(a, b, strict=True))
