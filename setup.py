"""What setup.cfg cannot say: the host kernels, the tag of their wheel, links on a package index."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

CSRC = Path("mp_optim/kernels/csrc")
LINKS = r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)"


class BuildKernels(build_ext):
    """A plain shared library, read through ctypes: its name has no Python version."""

    def build_extensions(self):
        """Compile the sources side by side: half the time on two cores."""
        compile_some = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor() as pool:
                made = pool.map(lambda source: compile_some([source], **options), sources)
                return list(chain.from_iterable(made))

        self.compiler.compile = compile_all
        super().build_extensions()

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    """One wheel for every Python; without a compiler one for every platform, too."""

    def get_tag(self):
        built = list(Path(self.bdist_dir).rglob("_native.so"))
        platform = super().get_tag()[2] if built else "any"
        return "py3", "none", platform


def readme():
    """README.md; its links lead to the repository if its release workflow builds this."""
    text = Path("README.md").read_text(encoding="utf-8")
    home = repository()
    if home is None:
        return text

    def absolute(link):
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({home}/{kind}/{os.environ['GITHUB_REF_NAME']}/{link[3]})"

    return re.sub(LINKS, absolute, text)


def repository():
    """Address of the repository whose workflow this is, or None."""
    if "GITHUB_REPOSITORY" not in os.environ:
        return None
    return "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)


def urls():
    """Addresses for the package index."""
    home = repository()
    if home is None:
        return {}
    return {
        "Homepage": home,
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            "mp_optim.kernels._native",
            sources=sorted(map(str, CSRC.glob("*.cpp"))),
            depends=sorted(map(str, [*CSRC.glob("*.inl"), *CSRC.glob("*.h")])),
            language="c++",
            optional=True,  # without a compiler the package steps with torch operations
            extra_compile_args=[
                *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-pthread"),
                # bits first: no contraction; a vector square root
                *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
                *("-Wno-psabi", "-Wno-unknown-pragmas"),
            ],
            extra_link_args=["-pthread", *(["-Wl,-s"] if sys.platform == "linux" else [])],
        )
    ],
)
