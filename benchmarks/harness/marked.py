"""The part of a Markdown page that a program writes: the lines between `<!-- NAME: …, do not edit -->` and `<!-- /NAME -->`."""


def marks(name: str) -> tuple[str, str]:
    """The comments above and below the part of this name."""
    return f"<!-- {name}: written by the script, do not edit -->", f"<!-- /{name} -->"


def replace(page: str, name: str, text: str) -> str:
    """The page with ``text`` as its part of this name; a page without the two comments is a ``ValueError``."""
    above, below = marks(name)
    if page.count(above) != 1 or page.count(below) != 1 or page.index(below) < page.index(above):
        raise ValueError(f"marked.replace: page must hold {above} and then {below}, once each, got other comments")
    before, rest = page.split(above)
    return f"{before}{above}\n{text}\n{below}{rest.split(below)[1]}"


def shows(page: str, name: str, text: str) -> bool:
    """True if ``text`` is the part of this name; False also for a page without the two comments."""
    above, below = marks(name)
    return page.count(f"{above}\n{text}\n{below}") == 1
