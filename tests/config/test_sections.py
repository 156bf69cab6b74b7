from tests.config.defaults import defaults, on_record


def test_defaults_are_those_on_record():
    """`python -m tests.config.defaults` writes them anew, for a change that the changelog tells."""
    found = {key: value for key, value in defaults().items() if ": algo." not in key}
    assert found == {key: value for key, value in on_record().items() if ": algo." not in key}
    assert found["data.train_on"] == "'assistant'"
    assert len(found) > 200
