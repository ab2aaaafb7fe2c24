"""What the site has beside the pages of this folder: pages of the root, results, and the reference.

Pages link to each other by their paths in the repository, so that links work on a hosting site too.
Here a link is led to where its page is on the site; a link to a source file becomes plain text.
"""

import dataclasses
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/*",
    "results/**/*",
)
TITLES = {
    "api": "Convert, inspect, save",
    "methods": "Methods",
    "compression": "Compress",
    "calibration": "Calibrate",
    "training": "Train and fine-tune",
    "evaluation": "Evaluate and benchmark",
    "report": "Visualize",
    "deployment": "Export and predict",
    "detection": "Detect",
    "models": "Name a network",
    "core": "Information bottleneck",
    "extending": "Contracts for new methods and families",
}
CONTRACTS = {
    "ltm.methods.base": ("MethodConfig", "Merger", "Site", "Hints", "Decision"),
    "ltm.core.merge": ("Merge",),
    "ltm.adapters.base": ("Adapter", "Layout", "Conversion"),
    "ltm.training.task": ("Task",),
}


def on_config(config: Any) -> Any:
    """Put the reference's pages where `nav` asks for them."""
    pages = [f"reference/{name}.md" for name in reference_pages()]
    titled = [{TITLES.get(Path(page).stem, Path(page).stem): page} for page in pages[1:]]
    for entry in config.nav:
        if entry.get("Reference"):
            entry["Reference"] = [pages[0], *titled]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside this folder, and the reference."""
    for path in _shown():
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for name, text in reference_pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Lead links to where their pages are on the site."""
    source = Path(page.file.abs_src_path or "")
    if ROOT not in source.parents:
        return markdown

    def lead(link: re.Match[str]) -> str:
        path, mark, anchor = link["target"].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        uri = _uri((source.parent / path).resolve())
        if files.get_file_from_path(uri) is None:
            return link["text"]
        place = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['sign']}[{link['text']}]({place}{mark}{anchor})"

    return re.sub(r"(?P<sign>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", lead, markdown)


def reference_pages() -> dict[str, str]:
    """The reference: a page for each package of `ltm` that has public names, and a list of all."""
    groups: dict[str, list[str]] = {}
    for home, names in _public_names().items():
        groups.setdefault(home.split(".")[1], []).extend(f"ltm.{name}" for name in names)
    for names in groups.values():
        names.sort(key=lambda name: (name.rpartition(".")[2][0].isupper(), name))
    groups["detection"] = [f"ltm.detection.{name}" for name in _detection_names()]
    groups["extending"] = [f"{home}.{name}" for home, names in CONTRACTS.items() for name in names]
    order = [name for name in TITLES if name in groups]
    order += [name for name in groups if name not in TITLES]
    index = "# Reference\n\nEvery public name, by what it is for.\n"
    pages = {"index": ""}
    for group in order:
        title = TITLES.get(group, group)
        listed = "\n".join(f"- [`{name}`][{name}]" for name in groups[group])
        index += f"\n## {title}\n\n{listed}\n"
        pages[group] = f"# {title}\n\n" + "\n\n".join(
            f"::: {name}{_options(group, name)}" for name in groups[group]
        )
    return pages | {"index": index}


def _options(group: str, name: str) -> str:
    """Of a method only its settings are shown, inherited ones too; the rest is its contract."""
    if group != "methods":
        return ""
    import ltm

    fields = [f.name for f in dataclasses.fields(getattr(ltm, name.removeprefix("ltm.")))]
    return f"\n    options:\n      inherited_members: true\n      members: {fields}"


def _shown() -> Iterator[Path]:
    for pattern in SHOWN:
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.is_file())


def _uri(path: Path) -> str:
    """The address of a file within the site's sources."""
    if ROOT not in path.parents:
        return ""
    if path.is_dir():
        path /= "README.md"
    uri = path.relative_to(ROOT).as_posix()
    return uri.removeprefix("docs/")


def _public_names() -> dict[str, tuple[str, ...]]:
    sys.path.insert(0, str(ROOT / "src"))
    import ltm

    return ltm._HOMES  # noqa: SLF001 - the one list of public names


def _detection_names() -> list[str]:
    import ltm.detection

    return dir(ltm.detection)
