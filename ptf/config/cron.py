"""Schedules of deployed flows, as cron writes them."""

CRON_NAMES = (
    (),
    (),
    (),
    ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
)


def schedule(text: str) -> bool:
    """Whether this is five fields of numbers, ranges, steps and lists, each within its bounds;
    months and days of the week may be names."""
    fields, ranges = text.split(), ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
    return len(fields) == len(ranges) and all(
        _times(field, *bounds, names) for field, bounds, names in zip(fields, ranges, CRON_NAMES, strict=True)
    )


def _times(field: str, low: int, high: int, names: tuple[str, ...]) -> bool:
    def number(word):
        return (
            names.index(word.lower()) + low
            if word.lower() in names
            else int(word)
            if word.isascii() and word.isdigit()
            else -1
        )

    for part in field.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if slash and not (step.isascii() and step.isdigit() and int(step) > 0):
            return False
        if span != "*" and not low <= number(first) <= (number(last) if dash else number(first)) <= high:
            return False
    return True
