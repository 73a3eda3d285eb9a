"""Names, links, commands and examples of the documents are correct."""

import ast
import importlib
import itertools
import operator
import re
import shlex
from pathlib import Path

import api_reference
import pytest
import tyro
import write_docs

import mp_optim
from lab.__main__ import COMMANDS as LAB
from mp_optim.apps.cli.command import COMMANDS
from support.launch import ROOT, run_forked_program

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "docs/llms.txt",
]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@each_document
def test_docs_name_only_existing_tests(document):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    assert {name for name in named if f"def {name}(" not in sources} == set()


@each_document
def test_docs_link_only_existing_files(document):
    text = document.read_text()
    linked = [document.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)", text)]
    named = [
        ROOT / path for path in re.findall(r"`((?:docs|mp_optim|tests|tools)/[\w/.]+\.\w+)`", text)
    ]
    assert [path for path in (*linked, *named) if not path.exists()] == []


def test_docstrings_and_error_messages_name_only_existing_doc_pages():
    """Docstrings and error messages may name a page of docs/."""
    sources = [*(ROOT / "mp_optim").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 5 and {name for name in named if not (ROOT / name).exists()} == set()


@each_document
def test_docs_link_only_anchors_that_a_code_host_generates(document):
    """mkdocs checks only the anchors of the site, and a code host makes other anchors from the
    headings."""
    links = re.findall(r"\]\((?!http)([^)\s#]*\.md)?#([^)\s]+)", document.read_text())
    targets = [(document.parent / path if path else document, name) for path, name in links]
    assert [(path, name) for path, name in targets if name not in anchors_of(path)] == []


def anchors_of(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,6} (.*)", text, re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    anchors = [re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in shown]
    return {*anchors, *re.findall(r' id="([\w-]+)"', text)}


def blocks_of(name, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_every_python_block_of_the_docs_has_a_test():
    """The table counts the Python blocks of each page. Each block has a test in
    test_doc_examples.py, functional/test_few_lines.py, unit/apps/megatron/test_install.py or
    unit/checkpoint/test_fsdp2_rank_counts.py."""
    counts = {path: len(blocks_of(path, "python")) for path in DOCUMENTS}
    assert {str(path.relative_to(ROOT)): count for path, count in counts.items() if count} == {
        "README.md": 3,
        "docs/fsdp2.md": 1,
        "docs/many_ranks.md": 1,
        "docs/troubleshooting.md": 1,
        "docs/checkpoints.md": 2,
        "docs/settings.md": 2,
        "docs/recipes.md": 1,
        "docs/outside_writes.md": 1,
        "docs/audit.md": 4,
        "docs/health.md": 2,
        "docs/deltas.md": 3,
        "docs/tenants.md": 1,
        "docs/migrate.md": 9,
        "docs/index.md": 1,
        "docs/quickstart.md": 4,
        "docs/clients/hf_trainer.md": 6,
        "docs/clients/accelerate.md": 2,
        "docs/clients/torchtitan.md": 1,
        "docs/clients/megatron.md": 1,
        "docs/clients/index.md": 3,
        "docs/llms.txt": 6,
    }


def test_docs_show_or_link_every_example_program():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    programs = {path.name for path in (ROOT / "tools/examples").glob("*.py")}
    assert {name for name in programs if f"tools/examples/{name}" not in pages} == set()


@each_document
def test_docs_contain_up_to_date_generated_parts(document):
    text = document.read_text()
    assert write_docs.page(text) == text, "run: python tools/write_docs.py"


def test_readme_has_at_most_1100_words():
    """A reader spends about two minutes on README.md."""
    assert len((ROOT / "README.md").read_text().split()) <= 1100


IMPORTED = {"mp_optim", "torch", "nn", "dist", "json", "os", "convert", "np", "transformers"}
"""Modules that blocks must import. Data (``model``, ``optimizer``) comes from the reader's program.
"""


@each_document
def test_python_blocks_of_the_docs_import_each_module_that_a_block_names(document):
    bound, missing = set(), set()
    for block in blocks_of(document, "python"):
        nodes = [*ast.walk(ast.parse(block))]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        aliases = [alias for node in imports for alias in node.names]
        bound |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        missing |= {node.id for node in names} - bound
    assert {one for one in missing if one in IMPORTED or hasattr(mp_optim, one)} == set()


def test_api_reference_lists_every_public_name():
    texts = [path.read_text() for path in (ROOT / "docs/api").glob("*.md")]
    shown = {
        name.removeprefix("mp_optim.") for text in texts for name in api_reference.documented(text)
    }
    shown |= {*re.findall(r"`(\w+)` (?:and `\w+` )?are other names of", "".join(texts))}
    shown |= {*re.findall(r"`\w+` and `(\w+)` are other names of", "".join(texts))}
    assert {*mp_optim.__all__} - {*shown, "checkpoint"} == set()
    assert "checkpoint.save" in shown


def test_design_page_names_only_identifiers_of_the_code():
    named = re.findall(
        r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*?\))?`", (ROOT / "docs/design.md").read_text()
    )
    code = "\n".join(path.read_text() for path in (ROOT / "mp_optim").rglob("*.py"))
    words = {word for name in named for word in name.split(".")}
    assert len(words) > 80
    assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set()


def test_docs_name_only_existing_class_members():
    """`Class.member` names a member of that class or of a base class."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "mp_optim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(_members(node))
                named = (ast.unparse(base).partition("[")[0] for base in node.bases)
                bases.setdefault(node.name, set()).update(named)

    def has(name: str, member: str) -> bool:
        if name not in members:
            # These bases belong to another package.
            return name not in ("ABC", "NamedTuple", "Protocol")
        return member in members[name] or any(has(base, member) for base in bases[name])

    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]
    named = {
        (page.name, *pair)
        for page in pages
        for pair in re.findall(r"`(?:mp_optim\.)?([A-Z]\w+)\.(\w+)", page.read_text())
        if pair[0] in members and pair[1] != "py"
    }
    assert len(named) > 20
    assert [each for each in sorted(named) if not has(*each[1:])] == []


def _members(node: ast.ClassDef) -> set[str]:
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(inner.name)
        elif isinstance(inner, (ast.Name, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
    return names


def test_contributing_lists_every_file_that_a_new_rule_touches():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = text[text.index("\n## Rules\n") : text.index("\n## Backends\n")]
    named = set(re.findall(r"`(mp_optim/[\w/]+\.\w+)`", recipe))
    files = named - {"mp_optim/config/setting_checks.py"}
    assert [name for name in files if "lion" not in (ROOT / name).read_text().lower()] == []
    assert len(files) == 9 and "touches nine files; Lion shows them" in recipe


@pytest.mark.parametrize(("document", "count"), [("troubleshooting.md", 20), ("llms.txt", 9)])
def test_docs_quote_only_messages_of_the_package(document, count):
    texts = []
    for path in (ROOT / "mp_optim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_constant(part) for part in node.values))
            else:
                texts.append(_constant(node))
    text = (ROOT / "docs" / document).read_text()
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("|")]
    quoted = [(row, part) for row in rows for part in re.findall(r'"([^"]+ [^"]+)"', row)]
    ours = [part for row, part in quoted if "(torch's)" not in row]
    assert len(ours) > count
    everything = "\n".join(texts)
    found = (part in everything or re.sub(r"\d+", "", part) in everything for part in ours)
    assert list(itertools.compress(ours, map(operator.not_, found))) == []


def _constant(node):
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def commands_in(document):
    text = document.read_text()
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    lines += re.findall(r"`((?:python|bash|torchrun) [^`]*(?:tools/|tests/lab )[^`]+)`", text)
    ours = r"(python|bash|torchrun)\b.* (tools/|tests/lab )"
    return [line for line in lines if re.match(ours, f"{line} ")]


LAUNCHED = {"tools/train.py"}
"""Programs that other tests run with existing files."""


def test_process_page_lists_every_environment_variable_that_is_read():
    page, names = (ROOT / "docs/process.md").read_text(), set()
    for path in (ROOT / "mp_optim").rglob("*.py"):
        text = path.read_text()
        # Programs under apps read their own variables.
        if "environ" in text and "apps" not in path.relative_to(ROOT).parts:
            names.update(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', text))
    assert {name for name in names if f"`{name}`" not in page} == set() and len(names) > 5


@each_document
def test_docs_commands_are_accepted_by_the_argument_parsers(document):
    for line in commands_in(document):
        words = shlex.split(line, comments=True)
        if words[1] == "tests/lab":
            command = importlib.import_module(LAB[words[2]][0])
            tyro.cli(command.Options, args=words[3:])
            continue
        index = next(i for i, word in enumerate(words) if word.startswith("tools/"))
        program, arguments = words[index], words[index + 1 :]
        assert (ROOT / program).exists(), line
        if (
            not program.endswith(".py")
            or program in LAUNCHED
            or program.startswith("tools/examples/")
        ):
            continue
        tool = importlib.import_module(Path(program).stem)
        if hasattr(tool, "Options") and arguments != ["--help"]:
            tyro.cli(tool.Options, args=arguments)
        else:
            assert not arguments or arguments == ["--help"], line


@each_document
def test_docs_name_only_existing_mp_optim_commands(document):
    assert set(re.findall(r"\bmp-optim (\w+)", document.read_text())) <= set(COMMANDS)


@pytest.mark.parametrize(
    ("tool", "document"),
    [("tools/fit_published.py", "docs/fit.md"), ("tools/fit_table.py", "docs/fit.md")],
)
@pytest.mark.slow
def test_fit_page_shows_the_present_output_of_the_tools(tool, document):
    written = run_forked_program(*tool.split(), timeout=1800)
    text = (ROOT / document).read_text()
    for part in written.strip().split("\n\n"):
        assert part in text, f"paste the output of python {tool}"
