"""The pages' links, anchors, and names of modules and programs exist in this tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "papers/README.md")]
    + [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
SOURCES = [
    path
    for folder in ("src", "papers", "tests", "benchmarks", "examples", "testbed", "lint")
    for path in (ROOT / folder).rglob("*.py")
]
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_DOTTED = re.compile(r"`(?:python -m )?(ctxflow(?:_papers)?\.(?![A-Z]+\b)[\w.]*\w)")
ENTRY_POINT_GROUPS = {"ctxflow.engines", "ctxflow.experiments"}  # They look like modules.


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def is_there(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a name that stands in the module before it."""
    package, *parts = dotted.split(".")
    place = ROOT / ("papers" if package == "ctxflow_papers" else "src") / package
    for number, part in enumerate(parts):
        if (place / part).is_dir():
            place /= part
            continue
        module = place / f"{part}.py"
        if module.is_file():
            rest = parts[number + 1 :]
        else:
            module, rest = place / "__init__.py", parts[number:]
        return not rest or re.search(rf"\b{rest[0]}\b", module.read_text()) is not None
    return (place / "__init__.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names_of_modules_exist(page):
    text, wrong = prose(page), []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if link.startswith(("https://", "http://")):
            continue
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    shown = re.findall(r"`([\w-]+\.py)`:\n\n```", page.read_text())  # Files that the page itself gives.
    for path in re.findall(r"`([\w-]+(?:/[\w-]+)*\.py)\b[^`]*`", text):
        if path not in shown and not any(f"/{source.relative_to(ROOT)}".endswith(f"/{path}") for source in SOURCES):
            wrong.append(path)
    wrong += [name for name in _DOTTED.findall(text) if name not in ENTRY_POINT_GROUPS and not is_there(name)]
    assert wrong == []


@pytest.mark.parametrize("index", ["docs/README.md", "docs/decisions/README.md"])
def test_an_index_lists_every_page_of_its_folder(index):
    page = ROOT / index
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", page.read_text()))
    assert {each.name for each in page.parent.glob("*.md")} - {"README.md"} - listed == set()


def test_decisions_are_listed_by_their_titles():
    folder = ROOT / "docs" / "decisions"
    for title, name in re.findall(r"^- \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.MULTILINE):
        assert (folder / name).read_text().startswith(f"# {title}\n")
