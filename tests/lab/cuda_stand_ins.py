"""Make a CUDA build of torch importable without NVIDIA's libraries. The Python with that build
runs it.
"""

import importlib.util
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

NVIDIA = re.compile(r"lib(cu|nccl|nv)")
FUNCTION = re.compile(r"(cu|nccl|nv)[a-zA-Z]\w+")


def output(*command: str) -> list[str]:
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text.splitlines()


def needed(library: Path) -> set[str]:
    names = re.findall(r"NEEDED.*\[(.*)\]", "\n".join(output("readelf", "-d", str(library))))
    return {name for name in names if NVIDIA.match(name)}


def symbols(library: Path, which: str) -> list[str]:
    return [line.split()[-1] for line in output("nm", "-D", which, str(library))]


def version_owners(library: Path) -> dict[str, str]:
    owners, owner = {}, ""
    for line in output("readelf", "-V", str(library)):
        if found := re.search(r"File: (\S+)", line):
            owner = found[1]
        elif found := re.search(r"Name: (\S+)", line):
            owners[found[1]] = owner
    return owners


def write_library(path: Path, versions: dict[str, set[str]]) -> None:
    functions = set().union(*versions.values())
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "functions.c", Path(folder) / "versions"
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in functions))
        nodes = {version: names for version, names in versions.items() if version}
        script.write_text(
            "".join(
                f"{version} {{ global: {'; '.join(names)}; }};\n"
                for version, names in nodes.items()
            )
        )
        named = [f"-Wl,--version-script={script}"] if nodes else []
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(path)]
        name = f"-Wl,-soname,{path.name}"
        subprocess.run([*command, name, *named, str(source)], check=True)


def main() -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    folder = Path(torch.origin).parent
    libraries = [*folder.glob("lib/*.so*"), *folder.glob("_C*.so")]
    ours = {name for library in libraries for name in needed(library)}
    present = {path.name for path in folder.parent.glob("nvidia/**/*.so*")}
    missing = sorted(ours - present - {path.name for path in libraries})
    defined: set[str] = set()
    wanted: dict[str, set[str]] = defaultdict(set)
    owners: dict[str, str] = {}
    for library in libraries:
        owners.update(version_owners(library))
        defined.update(name.split("@")[0] for name in symbols(library, "--defined-only"))
        for symbol in symbols(library, "--undefined-only"):
            name, _, version = symbol.partition("@")
            wanted[version.lstrip("@")].add(name)
    plain = {name for name in wanted[""] if FUNCTION.fullmatch(name)} - defined
    for library_name in missing:
        versions = {
            version: names
            for version, names in wanted.items()
            if owners.get(version) == library_name
        }
        write_library(folder / "lib" / library_name, {**versions, "": plain})
    print(f"stand-ins for {len(missing)} libraries of NVIDIA: {' '.join(missing)}")


main()
