"""Workloads that raise any exception anywhere, or hold odd objects or any kind of tensor."""

import sys

import yaml
from hypothesis import strategies as st

from tests.replay import test_tensor_kinds as kinds
from tests.workload import test_raising as raising

RAISING = [line for line, _ in raising.RAISED.values()] + [
    'raise type("Odd", (Exception,), {"__repr__": None, "__str__": None})()',
    'raise type("Odd\\x1b[31m", (Exception,), {})("[red]\\x1b]0;x\\x07\\u202e")',
    'raise RecursionError("deep")',
    "raise MemoryError",
    'raise OSError(28, "No space left on device")',
    'raise BrokenPipeError(32, "Broken pipe")',
    'raise torch.cuda.OutOfMemoryError("CUDA out of memory")',
    'raise RuntimeError("expected scalar type Half but found Float")',
    'raise ValueError("x") from Stop("cause")',
    "raise KeyError({})",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')",
    'raise SyntaxError("x", ("w.py", 3, 1, "text"))',
    "raise AssertionError",
    "raise NotImplementedError",
    "import nothing_of_this_name",
    "sys.exit()",
    'sys.exit("goodbye")',
    "quit()",
    "return boom(after)",
    "1 / 0",
    *(['raise BaseExceptionGroup("many", [Stop("one"), ValueError("two")])'] if sys.version_info >= (3, 11) else []),
]

ODD = (
    "threading.Lock()",
    "(i for i in ())",
    "open(__file__)",
    "sys",
    "lambda: None",
    "weakref.ref(Odd)",
    "torch.Generator()",
    "nested(5000)",
    "itself()",
    "range(10**9)",
    "{1: torch.ones(2), None: 3, (): [torch.ones(1)]}",
    "collections.defaultdict(list)",
    "collections.OrderedDict(a=torch.ones(1))",
    "types.MappingProxyType({'a': torch.ones(1)})",
    "memoryview(b'x')",
    "float('nan')",
    "torch.nn.Linear(2, 2)",
    "[torch.nn.Linear(2, 2)]",
    "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)",
    "torch.ones(2, requires_grad=True) * 2",
    "torch.jit.script(torch.nn.Linear(2, 2))",
    "torch.ones(2).numpy()",
    "torch.Size([1])",
    "torch.float16",
    "torch.utils.data.DataLoader([1, 2])",
    "iter([torch.ones(1)])",
    "Odd",
    *(f'odd("{name}")' for name in "__eq__ __hash__ __bool__ __len__ __iter__ __getattr__ __repr__".split()),
    *(f'odd("{name}")' for name in "__deepcopy__ __copy__ __reduce_ex__ __getattribute__ __dir__ __setattr__".split()),
    *(
        f'odd("{name}")'
        for name in "__getstate__ __class__ __dict__ __contains__ __getitem__ __del__ __slots__".split()
    ),
)

ODD_WORKLOAD = """\
import collections, sys, threading, types, weakref
import torch
from torch import nn


class Odd:
    pass


def odd(name):
    def broken(self, *args):
        raise RuntimeError("boom in " + name)

    if name in ("__class__", "__dict__"):
        return type("Broken", (), {{name: property(broken)}})()
    if name == "__slots__":
        return type("Broken", (), {{"__slots__": ("a", "b")}})()
    return type("Broken", (), {{name: broken}})()


def nested(depth):
    value = torch.ones(1)
    for _ in range(depth):
        value = [value]
    return value


def itself():
    value = [torch.ones(1)]
    value.append(value)
    value.append({{"again": value}})
    return value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        {model}

    def forward(self, x, held=None):
        {forward}
        return (self.head(x) * {gain}).float().square().mean()


def batches():
    return [(torch.ones(2, 4), {batch}) for _ in range(3)]


def step(model, batch):
    return {output}
"""

COMMANDS = (
    *(("scan",), ("scan", "--json"), ("ranges",), ("bisect",), ("suggest-fp32", "--no-verify")),
    ("cost", "--batch-size", "1MB"),
)


@st.composite
def raising_workloads(draw: st.DrawFn) -> dict[str, str]:
    """The files of a workload that raises at a place of ``raising.PLACES``."""
    place = draw(st.sampled_from(list(raising.PLACES)))
    late = 3 * (raising.PLACES[place] > 0) * draw(st.sampled_from([0, 1]))
    text = raising.WORKLOAD.replace("RAISING", draw(st.sampled_from(RAISING)))
    text = text.replace("PLACE", place).replace("AFTER", str(late))
    keys = {"model": "Net", "data": "batches", "optimizer": "Optimizer"}
    targets = {key: {"target": f"workload.py:{name}"} for key, name in keys.items()}
    return {"workload.py": text, "config.yaml": yaml.safe_dump({**targets, "train": {"steps": 5, "device": "cpu"}})}


@st.composite
def odd_workloads(draw: st.DrawFn) -> dict[str, str]:
    """The files of a workload that holds odd objects."""
    thing = st.sampled_from(ODD)
    text = ODD_WORKLOAD.format(
        model=draw(
            st.sampled_from(["self.odd = {0}", "self.odd = [{0}, {0}]", "self.__dict__['a.b'] = {0}", "pass"])
        ).format(draw(thing)),
        forward=draw(
            st.sampled_from(["pass", "pass", "self.seen = {0}", "self.more = getattr(self, 'more', []) + [{0}]"])
        ).format(draw(thing)),
        batch=draw(st.sampled_from(["{0}", "[{0}]", "None"])).format(draw(thing)),
        output=draw(
            st.sampled_from(
                ["model(*batch)", "{{'a': model(batch[0]), 'b': model(batch[0])}}", "model(batch[0]), {0}", "{0}"]
            )
        ).format(draw(thing)),
        gain=draw(st.sampled_from(["1.0", "1e6", "float('nan')"])),
    )
    config = "model: {target: workload.py:Net}\ndata: {target: workload.py:batches}\ntrain: {steps: 3, device: cpu}\n"
    return {
        "workload.py": text,
        "config.yaml": config + draw(st.sampled_from(["", "step: {target: workload.py:step}\n"])),
    }


@st.composite
def tensor_workloads(draw: st.DrawFn) -> dict[str, str]:
    """The files of a workload whose model or batches hold a kind of tensor."""
    arguments = f"kinds: [{draw(st.sampled_from(kinds.KINDS))}], place: {draw(st.sampled_from(kinds.PLACES))}"
    factor = draw(st.sampled_from([kinds.FAILING, kinds.HEALTHY]))
    config = (
        f"model: {{target: workload.py:Net, args: {{{arguments}, factor: {factor}}}}}\n"
        f"data: {{target: workload.py:data, args: {{{arguments}}}}}\n"
        "step: {target: workload.py:step}\ntrain: {steps: 2, device: cpu}\n"
    )
    return {"workload.py": kinds.WORKLOAD, "config.yaml": config}


workloads = raising_workloads() | odd_workloads() | tensor_workloads()
