"""Ranking of a catalogue by a baseline: of the same users, with the same measures, as a model ranks it for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ptf import storage
from ptf.config.sections.evaluate import RankingConfig
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.events import histories
from ptf.events.baselines import fit
from ptf.events.catalogue import Catalogue, beside, load_item_vectors
from ptf.events.model_ranking import BATCH, evaluate_ranking
from ptf.events.purchases import Purchases


def rank_baselines(
    section: RankingConfig, prompts: Mapping[str, Sequence[Prompt]], directory: Path
) -> dict[str, float]:
    """Return the mean measures `baseline/NAME/…/SOURCE` of the config's baselines, fitted on the training histories
    beside the catalogue. Those of each user are written to `directory/NAME/SOURCE.jsonl`.

    With `value_weight`, a score takes the place of a probability. Raises UserError for a prompt whose history is not
    that of its user.
    """
    catalogue, vectors = Catalogue.load(section.catalogue), load_item_vectors(section.catalogue)
    known = histories.load(beside(section.catalogue, "histories.jsonl"))
    names = [item.name for item in catalogue.items]
    train, metrics = Purchases.of([*known.items()], names), dict[str, float]()
    for name, settings in section.baselines.items():
        fitted = fit(name, settings, train)

        def score(prompts: Sequence[Prompt], fitted=fitted, name=name) -> Iterator[tuple[int, np.ndarray]]:
            order = sorted(range(len(prompts)), key=lambda i: prompts[i].row.get("now") or 0.0)  # a day's together
            for start in range(0, len(prompts), BATCH):
                numbers = order[start : start + BATCH]
                rows = [prompts[i].row for i in numbers]
                asked = [(row["user"], _history(known, row)) for row in rows]
                scores = fitted(Purchases.of(asked, names, [row.get("now") for row in rows]))
                if np.isnan(scores).any():
                    raise UserError(
                        f"evaluate.ranking.baselines.{name}: these settings give scores that are no numbers"
                    )
                with np.errstate(divide="ignore"):
                    yield from zip(numbers, np.log(scores) if section.value_weight else scores, strict=True)

        for source, asked in prompts.items():
            means, rows = evaluate_ranking(score, asked, catalogue, vectors, section.k, section.value_weight)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            storage.write_text(str(directory / name / f"{source}.jsonl"), text)
            metrics |= {f"baseline/{name}/{key}/{source}": value for key, value in means.items()}
    return metrics


def _history(known: Mapping[str, histories.History], row: Mapping) -> histories.History:
    history = known.get(row.get("user", ""), ())
    if not history or {item for basket in history for item in basket.items} != set(row.get("history", ())):
        raise UserError(
            f"evaluate.ranking.baselines: histories.jsonl has another history of user {row.get('user')!r} than the "
            "held-out row; rank the `held_out.jsonl` that was prepared with it"
        )
    return history
