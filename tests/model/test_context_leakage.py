"""Documents of a packed sequence that ranks divide never see each other; benchmarks/leakage.py looks at more."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.model import leakage
from tests.model.leakage import batch_of, divided, lengths, look, moved
from tests.model.ranks import two_ranks

PACKINGS = 30  # of each mixer forward, and as many backward
OWN_PART = "backend of a rank's own part"


def _each(models: Path) -> dict[str, list[float]]:
    """Return for each mixer what crosses, and by how much it is apart, in bounds; and the share of faults found."""
    # drawing them anew would import transformers
    leakage.random_model = torch.load(models, weights_only=False).__getitem__
    rng, found = np.random.default_rng(0), {}
    for mixer in divided(2):
        width = mixer.widths[-1]  # which the ranks do not divide
        seen = look(mixer, batch_of(lengths(rng, PACKINGS, width), rng, width), rng)
        change = moved(mixer, batch_of(lengths(rng, PACKINGS), rng), rng)
        wrong = batch_of([each for each in lengths(rng, 20) if len(each) > 1], rng)
        caught = moved(mixer, wrong, rng, mixer.faults[OWN_PART]) > 0
        crossing = torch.cat((seen.crossing, change)).max()
        found[mixer.name] = [float(crossing), float(seen.apart.max()) / mixer.bound, float(caught.double().mean())]
    return found


def test_documents_that_ranks_divide_never_see_each_other(tmp_path) -> None:
    torch.save({mixer: leakage.random_model(mixer) for mixer in leakage.OF_RANKS}, tmp_path / "models.pt")
    found = two_ranks(partial(_each, tmp_path / "models.pt"), tmp_path)[0]
    assert len(found) == 5
    assert {name: crossing for name, (crossing, _, _) in found.items() if crossing} == {}
    assert {name: apart for name, (_, apart, _) in found.items() if not apart <= 1} == {}
    assert {name: caught for name, (_, _, caught) in found.items() if caught < 1} == {}, "negative control"
