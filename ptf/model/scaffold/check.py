"""The verification of a draft: random configs, and the config.json that it was drafted from with small sizes."""

import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import transformers

from ptf.errors import UserError
from ptf.model.families import family_of
from ptf.model.scaffold import registration
from ptf.model.scaffold.reference import Reference
from ptf.model.scaffold.settings import COMMON
from ptf.model.verify import Case, Report, compare_member, verify

TRANSFORMERS = Path(transformers.__file__).parent
PTF = Path(registration.__file__).parents[2]
FAMILIES = PTF / "model" / "families"
OURS = "the family's "


def check(reference: Reference, text: str, configs: int, until_failure: bool = False) -> Report:
    """Verify a text as the family of its name; what the verifier cannot run is a problem of the report."""
    with registration.provisional(reference.model_type, text):
        return checked(reference, configs, until_failure)


def checked(reference: Reference, configs: int, until_failure: bool = False) -> Report:
    """Verify a family, and after the random configs the directory's; what the verifier cannot run is a problem of the
    report."""
    cases: list[Case] = []
    try:
        verify(reference.model_type, configs, until_failure=until_failure, progress=cases.append)
    except Exception as error:  # a draft may be wrong in any way
        cases.append(Case({}, problems=(raised(error),)))
    if reference.given and not (until_failure and not all(case.passed for case in cases)):
        try:
            cases.append(_own_case(reference))
        except Exception as error:  # as above
            cases.append(Case(reference.own, problems=(raised(error),)))
    return Report(reference.model_type, cases)


def _own_case(reference: Reference) -> Case:
    """Compare the directory's config.json with small sizes; whether it is accepted as it is is part of it."""
    case = compare_member(reference.own, 0)
    return replace(case, problems=(*_refused(reference), *case.problems))


def _refused(reference: Reference) -> Iterator[str]:
    """Yield why the family refuses the directory's config.json: as it is, or as transformers saves it again."""
    again = transformers.AutoConfig.for_model(**reference.given).to_dict()
    whole = {**{key: again[key] for key in COMMON if key in again}, **reference.given}
    for what, config in (("the config.json", whole), ("the config.json as transformers saves it", again)):
        try:
            family_of(config).config(config)
        except UserError as error:
            yield f"{what}: {error}"


def raised(error: Exception) -> str:
    """Return an error with the line that raised it, and whose that is: the family's, ptf's, or transformers'."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    places = [place for frame in traceback.extract_tb(error.__traceback__) if (place := _place(frame))]
    if isinstance(error, UserError) or not places:
        return text
    family = [place for place in places if place.startswith(OURS)]
    through = f", from {family[-1]}" if family and places[-1] != family[-1] else ""
    return f"{text} (raised in {places[-1]}{through})"


def _place(frame: traceback.FrameSummary) -> str:
    """Return whose code a frame is, and where; "" for the libraries beneath and for this file."""
    path = Path(frame.filename)
    if registration.is_provisional(frame.filename) or (path.parent == FAMILIES and path.stem != "__init__"):
        return f"{OURS}{frame.name}(), line {frame.lineno}"
    for name, root in (("transformers", TRANSFORMERS), ("ptf", PTF)):
        if path.is_relative_to(root) and path != Path(__file__):
            return f"{name}, {path.relative_to(root).as_posix()} line {frame.lineno}"
    return ""
