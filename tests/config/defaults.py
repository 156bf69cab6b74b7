"""The defaults of all keys, and those on record: a run without a key trains by its default, so a default is part of the
interface, and changes with an entry in the changelog alone.

    python -m tests.config.defaults      writes what is on record
"""

from pathlib import Path

from ptf.config.explain import keys, section_at
from ptf.config.schema import jobs

FILE = Path(__file__).parent / "stored" / "defaults.txt"


def defaults() -> dict[str, str]:
    """Key (of a recipe's own: `RECIPE: algo.KEY`) → its default as Python writes it, or `required`."""
    found: dict[str, str] = {}
    for recipe, job in jobs().items():
        for key, field in keys(job):
            if key == "algo" or (section_at(field.annotation, []) and not field.is_required()):
                continue  # a section's keys are listed themselves
            name = f"{recipe}: {key}" if key.startswith("algo.") else key
            found[name] = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
    return found


def on_record() -> dict[str, str]:
    """What `defaults` was when it was last written."""
    return dict(line.split(" = ", 1) for line in FILE.read_text().splitlines())


if __name__ == "__main__":
    FILE.write_text("".join(f"{key} = {value}\n" for key, value in sorted(defaults().items())))
