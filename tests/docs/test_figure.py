"""The picture of the README is drawn from the table of the results page."""

import runpy

from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def test_the_picture_is_that_of_the_table() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "main_job_figure.py"))
    page = (RESULTS / "main_job.md").read_text()
    assert (RESULTS / "main_job.svg").read_text() == script["figure"](page), "run benchmarks/main_job_figure.py"
    assert script["figure"](page.replace("0.794 / 0.882", "0.194 / 0.882")) != script["figure"](page)
    assert "benchmarks/results/main_job.svg" in (ROOT / "README.md").read_text()
