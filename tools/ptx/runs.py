"""Runs over many launches: all trials, and the library's self-test."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from typing import Any

import torch
from rich.console import Console

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.self_test import prove
from ptx import forms, record, trials
from ptx.options import Options
from ptx.parser import parse
from ptx.triton_driver import Launch, StaticDriver


class Noting:
    """A backend on the emulator that counts the forms of its launches."""

    def __init__(self) -> None:
        self.backend = MachineBackend()
        self.launched: Counter[forms.Form] = Counter()

    def carry(self, launch: Launch) -> None:
        self.launched[forms.form_of(launch)] += 1
        self.backend.carry_out(launch)

    def texts(self, arch: int, trial: trials.Trial, lists: Any) -> str:
        """Compile a trial for a target, and return digests of all kernels that it would execute."""
        found: set[str] = set()

        def note(launch: Launch) -> None:
            self.launched[forms.form_of(launch)] += 1
            self.backend.pass_by(launch)
            found.add(_text_of(launch))

        with StaticDriver(arch, note):
            trials.stepped(self.backend, trial, lists)
        return "\n".join(sorted(found))


def _text_of(launch: Launch) -> str:
    """Return a digest of a kernel's text without its target, comments and line numbers, and of the
    threads and bytes of a block."""
    program = parse(launch.function.ptx)
    parts = [str(program.params), str(program.kinds), str(program.depot)]
    parts += [f"{one.text} {one.guard} {one.negated} {one.target}" for one in program.instructions]
    parts += [str(launch.warps), str(launch.shared)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def self_test(options: Options, console: Console) -> bool:
    """True if the library proves the backend on every target."""
    right = True
    for arch in options.arches:
        noting, began = Noting(), time.perf_counter()
        host = torch.device("cpu")
        with StaticDriver(arch, noting.carry):
            proof = prove(noting.backend, host)
            exact, said = proof.exact, proof.reason
        launched = f"{sum(noting.launched.values())} launches of {len(noting.launched)} forms"
        console.print(f"sm_{arch}: {said}; {launched}, {time.perf_counter() - began:.0f} s")
        if options.record and exact:
            record.note(f"sm_{arch}", "proven", f"{said}, {launched}")
        right &= exact
    return right


def _chosen(options: Options) -> list[trials.Trial]:
    found = trials.trials_of(forms.read())
    if options.only:
        wanted = re.compile("|".join(options.only))
        found = [trial for trial in found if wanted.search(str(trial))]
    return found[:: options.every]


def all_trials(options: Options, console: Console) -> bool:
    """Return True if every trial has reference's bits on every target. A text to which several
    targets compile is executed once."""
    known, chosen = set(forms.read()), _chosen(options)
    sizes = trials.sizes_of(options.elements // trials.LAUNCHES)
    targets, wrong = {arch: Noting() for arch in options.arches}, 0
    for trial in chosen:
        began, done = time.perf_counter(), dict[str, tuple[int, str]]()
        lists, theirs = (
            trials.lists_for(trial, sizes),
            trials.Found(ReferenceBackend(), trial, sizes),
        )
        for arch, noting in targets.items():
            texts = noting.texts(arch, trial, lists)
            if texts not in done:
                with StaticDriver(arch, noting.carry):
                    done[texts] = _tried(noting.backend, trial, sizes, theirs)
            differing, error = done[texts]
            if differing or error:
                wrong += 1
                console.print(f"sm_{arch} {trial}: {differing} differ. {error}")
        seconds = time.perf_counter() - began
        console.print(f"{trial}: {len(done)} texts, {seconds:.1f} s", highlight=False)
    said = f"{len(chosen)} trials of {trials.LAUNCHES * sum(sizes):,} elements"
    console.print(f"{said}, {wrong} wrong")
    for arch, noting in targets.items():
        if options.record and not wrong:
            record.note(f"sm_{arch}", "executed", said)
        launched = set(noting.launched)
        told = f"{len(launched)} forms, {len(launched - known)} not in the list;"
        console.print(f"sm_{arch}: {told} not launched: {len(known - launched)}")
    return not wrong


def _tried(
    backend: MachineBackend, trial: trials.Trial, sizes: list[int], theirs: trials.Found
) -> tuple[int, str]:
    """Return the number of elements of a trial that differ, and the emulator's error."""
    try:
        return sum(trials.differences(trials.Found(backend, trial, sizes), theirs).values()), ""
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"


def run(options: Options, console: Console) -> bool:
    if options.list:
        for trial in trials.trials_of(forms.read()):
            console.print(str(trial), highlight=False)
        return True
    torch.set_num_threads(1)
    if options.proof:
        return self_test(options, console)
    return all_trials(options, console)
