from pathlib import Path

from ptf.config.foreign_names import FOREIGN

KNOWN = Path(__file__).with_name("foreign_names.txt").read_text().split()


def test_no_name_that_people_bring_has_lost_its_hint():
    """A name that gets a hint is added to the file."""
    assert sorted(FOREIGN) == KNOWN
    assert len(KNOWN) > 100
