"""Runs over many launches: all trials, and the library's self-test."""

from __future__ import annotations

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
from ptx.results import Executed, OnTarget, Results, table
from ptx.tables import tables
from ptx.triton_driver import Launch, StaticDriver


class Noting:
    """A backend on the machine; the forms of its launches are counted."""

    def __init__(self) -> None:
        self.backend = MachineBackend()
        self.launched: Counter[forms.Form] = Counter()

    def carry(self, launch: Launch) -> None:
        self.launched[forms.form_of(launch)] += 1
        self.backend.carry_out(launch)


def self_test(options: Options, console: Console) -> bool:
    """Whether the library proves the backend on every target."""
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


def _tried(noting: Noting, trial: trials.Trial, sizes: list[int], theirs: Any) -> tuple[int, str]:
    """How many elements of a trial differ, and what the machine refused."""
    try:
        found = trials.tried(noting.backend, trial, sizes, theirs)
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"
    return sum(found.values()), ""


def _chosen(options: Options) -> list[trials.Trial]:
    found = trials.trials_of(forms.read())
    if options.only:
        wanted = re.compile("|".join(options.only))
        found = [trial for trial in found if wanted.search(str(trial))]
    return found[:: options.every]


def all_trials(options: Options, console: Console) -> bool:
    """Whether every trial has reference's bits on every target. What several targets compile to
    the same text is carried out once."""
    known, chosen = forms.read(), _chosen(options)
    sizes, results = trials.sizes_of(options.elements // trials.LAUNCHES), Results()
    targets = {arch: OnTarget() for arch in options.arches}
    noting = Noting()
    for trial in chosen:
        began, work = time.perf_counter(), _Work(noting, trial, sizes, results)
        digests = {arch: work.texts(arch, found) for arch, found in targets.items()}
        for arch, found in targets.items():
            done = work.executed(arch, digests[arch])
            found.executed.append(done)
            if done.error or done.differing:
                console.print(f"sm_{arch} {trial}: {done.differing} differ. {done.error}")
        seconds, different = time.perf_counter() - began, len(set(digests.values()))
        console.print(f"{trial}: {different} texts, {seconds:.1f} s", highlight=False)
    for line in table(targets):
        console.print(line, highlight=False)
    done = [each for found in targets.values() for each in found.executed]
    wrong = sum(bool(each.error or each.differing) for each in done)
    said = f"{len(chosen)} trials of {trials.LAUNCHES * sum(sizes):,} elements"
    console.print(f"{said}, {wrong} wrong")
    for arch in targets if options.record and not wrong else ():
        record.note(f"sm_{arch}", "executed", said)
    for arch, found in targets.items():
        never = [form for form in known if form not in found.texts]
        new = [form for form in found.texts if form not in known]
        said = f"{len(found.texts)} forms, {len(new)} not in the list; not launched: {len(never)}"
        console.print(f"sm_{arch}: {said}")
        if len(chosen) == len(trials.trials_of(known)):
            for form in never:
                console.print(f"  {form}")
    return not wrong


class _Work:
    """A trial, whose tensors and expected values are those of all targets."""

    def __init__(
        self, noting: Noting, trial: trials.Trial, sizes: list[int], results: Results
    ) -> None:
        self._noting, self._trial, self._sizes, self._results = noting, trial, sizes, results
        self._lists = trials.lists_for(trial, sizes)
        self._theirs: trials.Found | None = None

    def texts(self, arch: int, target: OnTarget) -> str:
        """A digest of what a target compiles, without carrying it out."""
        launched: list[Launch] = []

        def note(launch: Launch) -> None:
            self._noting.backend.pass_by(launch)
            launched.append(launch)

        with StaticDriver(arch, note):
            trials.stepped(self._noting.backend, self._trial, self._lists)
        return target.note(launched)

    def executed(self, arch: int, texts: str) -> Executed:
        """What carrying it out finds, or found."""
        elements = trials.LAUNCHES * sum(self._sizes)
        known = self._results.of(str(self._trial), texts, elements)
        if known is not None:
            return known
        if self._theirs is None:
            self._theirs = trials.Found(ReferenceBackend(), self._trial, self._sizes)
        began = time.perf_counter()
        with StaticDriver(arch, self._noting.carry):
            differing, error = _tried(self._noting, self._trial, self._sizes, self._theirs)
        seconds = round(time.perf_counter() - began, 1)
        done = Executed(str(self._trial), texts, elements, differing, error, arch, seconds)
        self._results.add(done)
        return done


def run(options: Options, console: Console) -> bool:
    """Do what is asked for; whether nothing was wrong."""
    if options.page:
        for page in record.pages():
            before = page.read_text()
            if (after := record.page(before)) != before:
                page.write_text(after)
        return True
    if options.list:
        for trial in trials.trials_of(forms.read()):
            console.print(str(trial), highlight=False)
        return True
    torch.set_num_threads(1)
    if options.sass:
        for name, heads, rows in tables(_chosen(options), options.arches):
            for line in record.table(heads, rows):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            if options.record:
                record.note_table(name, heads, rows)
        return True
    if options.proof:
        return self_test(options, console)
    return all_trials(options, console)
