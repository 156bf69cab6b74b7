"""The log of responses: what is in it after it is closed."""

from ptf.config.sections.track import TrackConfig
from ptf.rl.response_log import ResponseLog


def test_its_file_is_closed_with_it(tmp_path):
    log = ResponseLog(tmp_path, TrackConfig(samples_every=1), None, 0)  # pyright: ignore[reportArgumentType]
    assert log.lines is not None
    assert not log.lines.file.closed
    log.close()
    assert log.lines.file.closed
    none = ResponseLog(tmp_path, TrackConfig(samples_every=0), None, 0)  # pyright: ignore[reportArgumentType]
    none.close()
    assert none.lines is None
