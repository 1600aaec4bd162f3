"""The page of ``ampdbg doctor``: a line for each fact, with its meaning and the advice."""

from __future__ import annotations

from ampdbg.escapes import harmless
from ampdbg.machine.facts import Machine
from ampdbg.machine.judgments import TENSOR_CORES, judged, judged_unit

from .view import Column, Headline, Page, Table, Words, first, line, lines

SIGNS = {
    "good": Words("✓", "good"),
    "bad": Words("✗", "bad"),
    "doubtful": Words("?", "doubtful"),
    "plain": Words("·", "faint"),
}


def page(machine: Machine) -> Page:
    """Return the page with all facts about the machine."""
    columns = (Column(kind="sign"), Column(kind="sign"), Column())
    rows = []
    for one in judged(machine):
        advice = lines(f"↳ {one.advice}" * bool(one.advice), tone="name")
        rows.append((line(SIGNS[one.tone]), one.topic, (line(one.says), *advice)))
    torch, driver = machine.torch, machine.driver
    is_slow = any(judged_unit(TENSOR_CORES, gpu).tone != "good" for gpu in torch.gpus)
    unused = "torch uses no GPU here; ampdbg emulates CUDA's autocast on the CPU."
    headline = first(
        (not torch.imported, Headline("bad", "ampdbg cannot run on this machine.")),
        (is_slow, Headline("doubtful", "FP16 runs on this machine, but does not pay off on every GPU.")),
        (torch.gpus, Headline("good", "FP16 runs on this machine's GPU.")),
        (driver.gpus or driver.problem, Headline("doubtful", unused)),
        (True, Headline("good", "No GPU here; ampdbg emulates CUDA's autocast on the CPU.")),
    )
    return harmless(Page(headline, (Table("", columns, tuple(rows)),)))
