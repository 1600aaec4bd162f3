"""Broken configs: valid ones with changed values, keys or characters."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import strategies as st

WORKLOAD = """\
import torch
from torch import nn

batches_left = 40


class Net(nn.Module):
    def __init__(self, width=4, gain=1.0):
        super().__init__()
        if not isinstance(width, int) or not 0 < width < 99:
            raise ValueError("width")
        self.body, self.head, self.gain = nn.Linear(4, width), nn.Linear(width, 2), gain

    def forward(self, x):
        return self.head(self.body(x) * self.gain)


net = Net()
one = torch.ones(3)


def batches(count=3):
    for _ in range(count):
        yield torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)


class Batches:
    # However many steps are asked for, it ends.
    def __iter__(self):
        global batches_left
        for _ in range(3):
            batches_left -= 1
            if batches_left < 0:
                raise RuntimeError("enough")
            yield torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)


def step(model, batch):
    return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}
"""

NAMES = """
    w.py:Net w.py:net w.py:one w.py:batches w.py:Batches w.py:step torch.optim:SGD math:pi
    torch.nn.functional:cross_entropy w.py: : w.py:nothing no.py:x ../w.py:Net w:Net
"""
TARGETS = (*NAMES.split(), "x" * 300)

VALID: tuple[dict[str, Any], ...] = (
    {"model": {"target": "w.py:Net"}, "data": {"target": "w.py:Batches"}, "step": {"target": "w.py:step"}},
    {
        "model": {"target": "w.py:Net", "args": {"width": 4, "gain": 1e5}},
        "data": {"target": "w.py:Batches", "args": {}},
        "loss": {"target": "torch.nn.functional:cross_entropy", "args": {"reduction": "mean"}},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}, "groups": "module"},
        "checkpoint": {"model": None, "optimizer": None, "scaler": None, "scheduler": None},
        "scheduler": {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 2}},
        "precision": {
            "dtype": "float16",
            "level": "O1",
            "policy": "cuda",
            "loss_scale": {"init": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
            "pins": ["body"],
        },
        "train": {"steps": 2, "accumulate": 2, "clip_grad_norm": 1.0, "seed": 3, "device": "cpu"},
    },
)

VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, False, 0, 1, 2, -1, 10**30, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), "", " ", "x"),
        *("nan", "1e3", "é\u202e\x1b[31m", "[red]", "*", "a" * 400, [], {}, [[]], [None], ["body", "*.x"], {"": {}}),
        *({"target": "w.py:Net"}, {1: 2}, {"a": {"b": [1, {"c": None}]}}, list(range(50)), *TARGETS),
        *("w.pt", "/dev/null", "/dev/zero", "/", "w.py", "cuda:1", "cpu", "bfloat16", "float32", "O0", "O2", "native"),
    ]
)

PIECES = st.sampled_from(
    [
        *("&a ", "*a", "<<: *a", "<<: [*a, *a]", "!!int ", "!!bool x", "!!timestamp x", "!!binary é", "!!set {a}"),
        *(
            "!!python/object:os.system ",
            "!!omap [a: 1]",
            "!!pairs",
            "!!null ",
            "! ",
            "!x!y ",
            "%YAML 1.2\n",
            "%TAG ! !\n",
        ),
        *("---\n", "...\n", "\t", "\x00", "\x85", "\u2028", "\ufeff", "\x1b[31m", "\u202e", "😀", '"\\ud83d"', '"\\x"'),
        *("{", "}", "[", "]", ": ", "- ", "? ", "| ", ">\n", "'", '"', "#", ",", "\n", "\n  ", "=", "~", "@", "`"),
        *(
            "0o7",
            "0b2",
            "1_000",
            "1:30",
            ".inf",
            ".nan",
            "-.INF",
            "1e999",
            "9" * 6000,
            "2024-13-45",
            "1" * 30,
            "[" * 2000,
        ),
        *("model:", "train: ", "steps: 0", "precision.pins: x", "args: {}", "a: " * 3, "- " * 500, "x" * 5000),
    ]
)

Path = tuple[Any, ...]


def paths(value: object, path: Path = ()) -> Iterator[Path]:
    """The paths of all values in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def changed(draw: st.DrawFn, data: Any, values: st.SearchStrategy[Any]) -> None:
    """Changes, renames, deletes or adds one item of plain data."""
    places = list(paths(data))
    if not places:
        return
    *above, last = draw(st.sampled_from(places))
    holder = data
    for key in above:
        holder = holder[key]
    how = draw(st.sampled_from(["value", "value", "value", "delete", "rename", "beside"]))
    if how == "value" or not isinstance(holder, dict):
        holder[last] = copy.deepcopy(draw(values))
    elif how == "beside":
        holder[draw(st.sampled_from(["x", "stepz", "target", "args", "init"]))] = copy.deepcopy(draw(values))
    else:
        value = holder.pop(last)
        if how == "rename":
            holder[draw(st.sampled_from([1, None, "é", "Model", f"{last} ", f"{last}s"]))] = value


def edited(draw: st.DrawFn, text: str) -> str:
    """Text with one piece removed, doubled or inserted."""
    start = draw(st.integers(0, len(text)))
    end = min(len(text), start + draw(st.integers(0, 12)))
    piece = draw(st.sampled_from(["", text[start:end] * 2]) | PIECES | st.text(max_size=3))
    return text[:start] + piece + text[end:]


@st.composite
def broken_configs(draw: st.DrawFn) -> bytes:
    """The content of a config file."""
    data = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 3))):
        changed(draw, data, VALUES)
    flow = draw(st.sampled_from([True, False, None]))
    try:
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    except TypeError:  # keys of several types
        text = json.dumps(data)
    for _ in range(draw(st.integers(0, 3))):
        text = edited(draw, text)
    encoding = draw(st.sampled_from(["utf-8"] * 9 + ["utf-16", "latin-1"]))
    return text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")


settings_given = st.lists(
    st.builds(
        "{}={}".format,
        st.sampled_from(
            ["train.steps", "train", "model.args.gain", "precision.pins", "x.y", "", ".", "loss", "a.b.c.d"]
        ),
        PIECES | st.sampled_from(["1", "{}", "[]", "null", "x: 1", "{a: 1, a: 2}"]),
    ).filter(lambda text: "\x00" not in text),  # a command line cannot hold a NUL
    max_size=2,
)
