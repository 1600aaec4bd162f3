"""Broken configs and workloads, one for each kind of mistake, with what the one message must say.

Each case is a folder: the config's text as ``config.yaml``, ``workload.py`` (a healthy one unless the case has its
own) and whatever else the case brings. Used through the functions and through the command line.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORKLOAD = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(x)


net = Net()


def build_model(width=4):
    return Net(width)


def build_batches(count=3, width=4):
    return [(torch.ones(8, width), torch.zeros(8, dtype=torch.int64)) for _ in range(count)]
"""

MODEL = "model: {target: workload.py:build_model}\n"
DATA = "data: {target: workload.py:build_batches}\n"
LOSS = "loss: {target: torch.nn.functional:cross_entropy}\n"
HEALTHY = MODEL + DATA + LOSS


@dataclass(frozen=True)
class Broken:
    """One mistake. ``expected`` are fragments of the message; ``also`` replaces or adds files.

    ``blames_user_code`` says that the mistake is an exception of the user's code, whose traceback is shown.
    """

    name: str
    config: str | bytes
    expected: tuple[str, ...]
    also: Mapping[str, str | bytes] = field(default_factory=dict)
    blames_user_code: bool = False

    def write(self, folder: Path) -> Path:
        """Writes the files of the case into ``folder`` and returns the config's path."""
        for name, content in {"workload.py": WORKLOAD, "config.yaml": self.config, **self.also}.items():
            raw = content if isinstance(content, bytes) else content.encode()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
        return folder / "config.yaml"


def _workload(addition: str) -> dict[str, str | bytes]:
    return {"workload.py": f"{WORKLOAD}\n\n{addition}"}


def _more(name: str, line: str, expected: tuple[str, ...]) -> Broken:
    """A line that makes a healthy config a broken one."""
    return Broken(name, f"{HEALTHY}{line}\n", expected)


def _step(name: str, body: str, expected: tuple[str, ...], blames_user_code: bool = False) -> Broken:
    """A step of that body."""
    also = _workload(f"def step(model, batch):\n{textwrap.indent(body, '    ')}\n")
    return Broken(name, MODEL + DATA + "step: {target: workload.py:step}\n", expected, also, blames_user_code)


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9))
MERGES = "b0: &b0 {x: 1}\n" + "".join(
    f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}], x: {n}}}\n" for n in range(1, 9)
)

BROKEN_CONFIGS: tuple[Broken, ...] = (
    Broken("only comments", "# model:\n", ("2 mistakes", "model: missing", "data: missing")),
    Broken("not a mapping", "- model\n- data\n", ("config.yaml:1", '["model", "data"]', "a mapping of model, data")),
    Broken("a bare word", "model\n", ("config.yaml:1", 'got "model"', "a mapping of model, data")),
    Broken("a bare target", "model: w.py:f\n" + DATA, ("config.yaml:1: model", "written as model: {target: w.py:f}")),
    Broken("a long bare target", f"model: {'x' * 10_000}\n" + DATA, ("config.yaml:1: model", "keys target, args")),
    Broken("unclosed bracket", MODEL + "data: {target: x.py:y\n", ("config.yaml:3", "not YAML", "bracket")),
    Broken("unclosed quote", 'model: "x\n', ("config.yaml:2", "not YAML", "quotation mark")),
    Broken("tab", "model:\n\ttarget: workload.py:build_model\n", ("config.yaml:2", "tab", "indent with spaces")),
    Broken("two colons", "model: target: workload.py:x\n", ("config.yaml:1", "not YAML", "':'")),
    Broken("bad indentation", "model:\n    target: a.py:b\n  args: {}\n", ("config.yaml:3", "indentation")),
    Broken("not UTF-8", HEALTHY.encode() + b"# caf\xe9\n", ("config.yaml:4", "UTF-8")),
    Broken("UTF-16", HEALTHY.encode("utf-16"), ("config.yaml:1", "UTF-8")),
    _more("control character", "# \x00", ("config.yaml:4", "control character")),
    Broken("python tag", "model: !!python/name:os.system {}\n", ("config.yaml:1", "plain YAML")),
    Broken("two documents", HEALTHY + "---\n" + HEALTHY, ("config.yaml:4", "one document")),
    Broken("alias of itself", "model: &m {args: *m}\n" + DATA, ("config.yaml:1", "contains itself")),
    Broken("aliases of aliases", HEALTHY + BOMB, ("config.yaml:", "more than 100,000 values")),
    Broken("merges of merges", HEALTHY + MERGES, ("config.yaml:", "more than 100,000 values")),
    Broken("a megabyte", HEALTHY + "# " + "x" * 2**20, ("config.yaml", "larger than 1,048,576 bytes")),
    _more("no boolean", "train: {steps: !!bool x}", ("config.yaml:4", "YAML type bool does not allow (x)")),
    _more("no time", "train: {seed: !!timestamp x}", ("config.yaml:4", "timestamp does not allow (x)")),
    _more("no number", "train: {seed: !!int x}", ("config.yaml:4", "YAML type int does not allow (x)")),
    _more("an empty number", "train: {steps: !!int }", ("config.yaml:4", "YAML type int does not allow ()")),
    _more("only a sign", "train: {steps: !!float '-'}", ("config.yaml:4", "type float does not allow (-)")),
    _more(
        "more steps than are counted",
        "train: {steps: 1000000000000000000000}",
        ("config.yaml:4: train.steps: got 1000000000000000000000", "at least 1, below 2**63"),
    ),
    Broken(
        "6,000 digits",
        HEALTHY + "train: {steps: " + "1" * 6000 + "}\n",
        ("config.yaml:4", "int does not allow (6000 characters)"),
    ),
    Broken(
        "5,000 digits in base 60",
        HEALTHY + "train: {steps: " + "59:" * 3000 + "1}\n",
        ("config.yaml:4", "int does not allow (9001 characters)"),
    ),
    Broken(
        "a long name in a file",
        "model: {target: workload.py:" + "x" * 300 + "}\n" + DATA,
        ("config.yaml:1: model.target", "workload.py has no '" + "x" * 77 + "...'; it defines Net"),
    ),
    Broken(
        "many long targets",
        "".join(f"{key}: {{target: '{'x/' * 1500}w.py:f'}}\n" for key in ("model", "data", "loss", "optimizer")),
        ("config.yaml: 4 mistakes", "config.yaml:4: optimizer.target"),
    ),
    Broken(
        "a long target without a colon",
        f"model: {{target: w.{'x' * 12000}}}\n" + DATA,
        ("config.yaml:1: model.target", "allowed: FILE.py:NAME"),
    ),
    _more("a long name", f"checkpoint: {'x' * 300}.pt", ("config.yaml:4: checkpoint", "255 characters")),
    Broken(
        "a long file name",
        f"model: {{target: '{'x' * 300}.py:f'}}\n" + DATA,
        ("config.yaml:1", "more than 255 characters"),
    ),
    Broken(
        "a long module",
        f"model: {{target: '{'x' * 300}:f'}}\n" + DATA,
        ("config.yaml:1", "is installed or lies beside the config"),
    ),
    _more("a long path", f"checkpoint: {'x/' * 3000}x.pt", ("config.yaml:4: checkpoint", "no folder")),
    _more("a far device", "train: {device: 'cuda:99999999999999999999'}", ("train.device", "up to 127")),
    Broken("a long key", HEALTHY + "x" * 1000 + ": 1\n", ("config.yaml:4: xxx", "unknown key")),
    Broken(
        "a long key of a target",
        "model: {" + "x" * 20_000 + "}\n" + DATA,
        ("config.yaml:1: model.xxx", "unknown key", "go under args: model.args.xxx"),
    ),
    _more("a long text", f"train: {{device: {'x' * 9999}}}", ('train.device: got "xxx', "up to 127")),
    Broken(
        "5,000 unknown keys",
        HEALTHY + "".join(f"key{number}: 1\n" for number in range(5000)),
        ("5,000 mistakes", "config.yaml:4: key0: unknown key", "and 4,980 more"),
    ),
    Broken("undefined alias", "model: *m\n" + DATA, ("config.yaml:1", "alias")),
    Broken("key given twice", HEALTHY + MODEL, ("config.yaml:4: model: given twice", "line 1")),
    _more(
        "inner key given twice",
        "train:\n  steps: 2\n  seed: 0\n  steps: 3",
        ("config.yaml:7: train.steps: given twice", "line 5"),
    ),
    Broken("no data", MODEL + LOSS, ("config.yaml:1: data: missing", "an iterable of batches")),
    Broken("no target", "model: {args: {}}\n" + DATA, ("config.yaml:1: model.target: missing", "FILE.py:NAME")),
    _more("misspelt section", "optimiser: {}", ("config.yaml:4: optimiser: unknown key", "'optimizer'")),
    _more("misspelt key", "train: {step: 3}", ("config.yaml:4: train.step: unknown key", "'steps'")),
    _more("key of another section", "steps: 3", ("config.yaml:4: steps:", "'train.steps'")),
    _more(
        "argument outside args", "optimizer: {lr: 1}", ("config.yaml:4: optimizer.lr: unknown key", "optimizer.args.lr")
    ),
    _more(
        "nothing as a key", "null: 1", ("config.yaml:4: null: got null as a key", "names that are strings (quote it")
    ),
    _more(
        "words and numbers that YAML reads",
        "optimizer:\n  yes: 1\n  args: {0x10: 1, 1.50: 2, 2001-01-01: 3}",
        (
            "config.yaml:5: optimizer.yes: got yes as a key",
            "config.yaml:6: optimizer.args.0x10: got 0x10 as a key",
            "config.yaml:6: optimizer.args.1.50: got 1.50 as a key",
            "config.yaml:6: optimizer.args.2001-01-01: got 2001-01-01 as a key",
            "names that are strings (quote it",
        ),
    ),
    _more("args a list", "optimizer: {args: [1]}", ("optimizer.args: got [1]", "argument names to values")),
    Broken("model empty", "model:\n" + DATA, ("config.yaml:1: model: got nothing", "target, args")),
    Broken("target without a name", "model: {target: workload.py}\n" + DATA, ("workload.py:NAME",)),
    _more(
        "dotted target",
        "optimizer: {target: torch.optim.SGD}",
        ("config.yaml:4: optimizer.target", "Did you mean 'torch.optim:SGD'?"),
    ),
    Broken("target not a name", "model: {target: 'workload.py:a-b'}\n" + DATA, ("'a-b' is no Python name",)),
    Broken("target neither file nor module", "model: {target: src/net:Net}\n" + DATA, ("neither a .py file",)),
    Broken("target a number", "model: {target: 3}\n" + DATA, ("model.target: got 3", "FILE.py:NAME")),
    Broken("no such file", "model: {target: worklaod.py:x}\n" + DATA, ("config.yaml:1", "Did you mean 'workload.py'?")),
    Broken("no such folder", "model: {target: src/m.py:x}\n" + DATA, ("config.yaml:1: model.target", "no folder")),
    Broken(
        "file is a folder",
        "model: {target: net.py:x}\n" + DATA,
        ("config.yaml:1: model.target", "a folder"),
        {"net.py/x": ""},
    ),
    Broken(
        "no such name in the file",
        "model: {target: workload.py:bulid_model}\n" + DATA,
        ("config.yaml:1: model.target", "Did you mean 'build_model'?"),
    ),
    Broken(
        "no such package",
        "model: {target: 'not_installed.zoo:Net'}\n" + DATA,
        ("config.yaml:1: model.target", "no module 'not_installed'", "FILE.py:Net"),
    ),
    _more("checkpoint missing", "checkpoint: w.pt", ("config.yaml:4: checkpoint: got 'w.pt'", "no such file")),
    _more("no steps", "train: {steps: 0}", ("config.yaml:4: train.steps: got 0", "at least 1")),
    _more("half a step", "train: {steps: 1.5}", ("train.steps: got 1.5", "whole number")),
    _more("steps a word", "train: {steps: many}", ('train.steps: got "many"', "whole number")),
    _more("steps true", "train: {steps: yes}", ("train.steps: got true", "whole number")),
    _more("no accumulation", "train: {accumulate: 0}", ("train.accumulate: got 0", "at least 1")),
    _more("clip to nothing", "train: {clip_grad_norm: 0}", ("train.clip_grad_norm: got 0", "above 0")),
    _more("negative seed", "train: {seed: -1}", ("train.seed: got -1", "from 0")),
    _more("unknown device", "train: {device: gpu}", ('train.device: got "gpu"', "cuda:INDEX")),
    _more("unknown dtype", "precision: {dtype: fp16}", ('precision.dtype: got "fp16"', "Did you mean 'float16'?")),
    _more(
        "key of another level",
        "precision: {level: O1, master_weights: true}",
        ("precision.master_weights: got true at level O1", "allowed at O2, O3"),
    ),
    _more("unknown level", "precision: {level: O5}", ('precision.level: got "O5"', "O0 (FP32), O1")),
    _more("unknown policy", "precision: {policy: gpu}", ("precision.policy", "cuda or native")),
    _more("negative scale", "precision: {loss_scale: -1}", ("precision.loss_scale: got -1", "positive")),
    _more("infinite scale", "precision: {loss_scale: .inf}", ("precision.loss_scale", "float32")),
    _more("scale a word", "precision: {loss_scale: dynamic}", ('loss_scale: got "dynamic"', "a mapping of init")),
    _more(
        "scale that does not grow",
        "precision: {loss_scale: {growth_factor: 1}}",
        ("precision.loss_scale.growth_factor: got 1", "above 1"),
    ),
    _more(
        "scale that does not back off",
        "precision: {loss_scale: {backoff_factor: 1.0}}",
        ("precision.loss_scale.backoff_factor: got 1.0", "between 0 and 1"),
    ),
    _more("pins a string", "precision: {pins: head}", ("precision.pins: got 'head'", "written as [head]")),
    _more("pin a number", "precision: {pins: [head, 3]}", ("precision.pins[1]: got 3", "module names")),
    _more("unknown grouping", "optimizer: {groups: layer}", ("optimizer.groups", "parameter, module or single")),
    Broken(
        "many at once",
        "model: {target: workload.py:Nett}\ndata: {target: data.py:x}\ntrian: {}\nprecision: {level: O9}\n",
        (
            "4 mistakes",
            "config.yaml:1: model",
            "config.yaml:2: data",
            "config.yaml:3: trian",
            "config.yaml:4: precision",
        ),
    ),
)

TRACED = """\
import warnings


def traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(Net(), torch.ones(8, 4))
"""

BROKEN_WORKLOADS: tuple[Broken, ...] = (
    Broken(
        "no super().__init__()",
        HEALTHY.replace("build_model", "Bare"),
        ("config.yaml:1: model.target", "a Bare with modules whose __init__ does not call super().__init__(): Bare"),
        _workload("class Bare(nn.Module):\n    def __init__(self):\n        self.width = 4\n"),
    ),
    Broken(
        "no super().__init__() in a child",
        HEALTHY.replace("build_model", "Outer"),
        ("a Outer with modules whose __init__ does not call super().__init__(): Bare",),
        _workload(
            "class Bare(nn.Module):\n    def __init__(self):\n        self.width = 4\n\n"
            "class Outer(Net):\n    def __init__(self):\n        super().__init__()\n        self.bare = Bare()\n"
        ),
    ),
    Broken(
        "a module that cannot be hashed",
        HEALTHY.replace("build_model", "Equal"),
        ("modules that define __eq__ and no __hash__: Equal", "`__hash__ = nn.Module.__hash__`"),
        _workload("class Equal(Net):\n    def __eq__(self, other):\n        return True\n"),
    ),
    Broken(
        "an optimizer without super().__init__()",
        HEALTHY + "optimizer: {target: workload.py:Bare}\n",
        ("config.yaml:4: optimizer.target", "gave a Bare whose __init__ does not call super().__init__()"),
        _workload(
            "class Bare(torch.optim.Optimizer):\n    def __init__(self, params):\n        self.params = params\n"
        ),
    ),
    Broken(
        "an optimizer before the model's own",
        HEALTHY.replace("build_model", "Own") + "optimizer: {target: workload.py:none}\n",
        ("optimizer.target", "This key overrides Own.configure_optimizers(); leave it out to use that"),
        _workload(
            "class Own(Net):\n    def configure_optimizers(self):\n        pass\n\ndef none(params):\n    pass\n"
        ),
    ),
    Broken(
        "a sparse loss",
        MODEL + DATA + "step: {target: workload.py:step}\n",
        ("the loss has the layout sparse_coo", ".to_dense()"),
        _workload("def step(model, batch):\n    return model(batch[0]).sum().to_sparse()\n"),
    ),
    Broken(
        "a module inside of itself",
        HEALTHY.replace("build_model", "Cycle"),
        ("a Cycle with a module inside itself: head.up; torch's .to(), .train()", "self.parent = [parent]"),
        _workload(
            "class Cycle(Net):\n    def __init__(self):\n        super().__init__()\n        self.head.up = self\n"
        ),
    ),
    Broken(
        "a traced model",
        HEALTHY.replace("build_model", "traced"),
        (
            "gave a TopLevelTracedModule with code from torch.jit.trace: the model itself",
            "give the module that was traced",
        ),
        _workload(TRACED),
    ),
    Broken(
        "a traced module in the model",
        HEALTHY.replace("build_model", "around"),
        ("gave a Sequential with code from torch.jit.trace: 1;", "give the module that was traced"),
        _workload(TRACED + "\ndef around():\n    return nn.Sequential(nn.Linear(4, 4), traced())\n"),
    ),
    _step(
        "a loss on the meta device",
        "return torch.zeros((), device='meta', requires_grad=True)",
        ("workload.py:step: the loss is on the meta device, which holds no values",),
    ),
    Broken(
        "no such name in the package",
        MODEL + DATA + "loss: {target: torch.nn:MSELos}\n",
        ("config.yaml:3", "'MSELoss'"),
    ),
    Broken("no such submodule", "model: {target: torch.zoo:Net}\n" + DATA, ("config.yaml:1", "no module 'torch.zoo'")),
    Broken(
        "missing names together",
        "model: {target: torch.nn:Linaer}\ndata: {target: torch.utils:Dataa}\n",
        ("config.yaml:1: model.target", "config.yaml:2: data.target"),
    ),
    Broken(
        "unknown argument",
        "model:\n  target: workload.py:build_model\n  args:\n    wdith: 4\n" + DATA,
        ("config.yaml:3: model.args", "no argument 'wdith'", "it takes width", "Did you mean 'width'?"),
    ),
    Broken(
        "missing argument",
        "model: {target: torch.nn:Linear, args: {in_features: 3}}\n" + DATA,
        ("config.yaml:1: model.args", "'out_features'"),
    ),
    Broken(
        "arguments for an instance",
        "model: {target: workload.py:net, args: {width: 3}}\n" + DATA,
        ("config.yaml:1: model.target", "an instance of Net", "no args"),
    ),
    Broken("model a number", "model: {target: 'math:pi'}\n" + DATA, ("math:pi is a float", "nn.Module class, factory")),
    Broken(
        "model no module", "model: {target: workload.py:build_batches}\n" + DATA, ("returned a list", "an nn.Module")
    ),
    Broken(
        "model without parameters", "model: {target: torch.nn:ReLU}\n" + DATA, ("a ReLU without a trainable parameter",)
    ),
    Broken(
        "frozen model",
        "model: {target: workload.py:frozen}\n" + DATA,
        ("without a trainable parameter",),
        _workload("def frozen():\n    return Net().requires_grad_(False)\n"),
    ),
    Broken(
        "lazy model", "model: {target: torch.nn:LazyLinear, args: {out_features: 2}}\n" + DATA, ("lazy parameters",)
    ),
    Broken(
        "model on the meta device",
        "model: {target: torch.nn:Linear, args: {in_features: 4, out_features: 2, device: meta}}\n" + DATA,
        ("meta device",),
    ),
    Broken(
        "model raises",
        "model: {target: workload.py:broken}\n" + DATA,
        ("config.yaml:1: model.target: workload.py:broken raised ValueError: no such width",),
        _workload("def broken():\n    raise ValueError('no such width')\n"),
        blames_user_code=True,
    ),
    Broken(
        "file raises",
        HEALTHY,
        ("importing workload.py raised ZeroDivisionError",),
        _workload("1 / 0\n"),
        blames_user_code=True,
    ),
    Broken(
        "file with a syntax error",
        HEALTHY,
        ("importing workload.py raised SyntaxError",),
        {"workload.py": "def build_model(:\n    pass\n"},
        blames_user_code=True,
    ),
    Broken(
        "file imports what is not there",
        HEALTHY,
        ("importing workload.py raised ModuleNotFoundError: No module named 'not_installed'",),
        {"workload.py": "import not_installed\n" + WORKLOAD},
        blames_user_code=True,
    ),
    Broken(
        "script that exits",
        HEALTHY,
        ("importing workload.py raised SystemExit: 2", '`if __name__ == "__main__":`'),
        _workload("import argparse\n\nargparse.ArgumentParser().parse_args(['--no-such-option'])\n"),
        blames_user_code=True,
    ),
    Broken(
        "data empty",
        MODEL + "data: {target: workload.py:build_batches, args: {count: 0}}\n" + LOSS,
        ("config.yaml:2: data.target", "gave no batches"),
    ),
    Broken(
        "data used up",
        MODEL + "data: {target: workload.py:stream}\n" + LOSS,
        ("ended after 2 batches and cannot be started again", "a list, a DataLoader, or a function"),
        _workload("stream = iter(build_batches(2))\n"),
    ),
    Broken("data a number", MODEL + "data: {target: 'math:pi'}\n", ("math:pi is a float", "an iterable of batches")),
    Broken(
        "data one batch",
        MODEL + "data: {target: workload.py:batch}\n" + LOSS,
        ("returned a tuple, which looks like one batch", "[batch]"),
        _workload("def batch():\n    return build_batches()[0]\n"),
    ),
    Broken(
        "data a data set",
        MODEL + "data: {target: workload.py:samples}\n" + LOSS,
        ("a Dataset of single samples", "DataLoader"),
        _workload("def samples():\n    return torch.utils.data.TensorDataset(torch.ones(3, 4))\n"),
    ),
    Broken(
        "several loaders",
        MODEL + "data: {target: workload.py:Both}\n" + LOSS,
        ("several DataLoaders",),
        _workload(
            "class Both:\n    def train_dataloader(self):\n"
            "        return [torch.utils.data.DataLoader([1]), torch.utils.data.DataLoader([2])]\n"
        ),
    ),
    Broken(
        "data raises",
        MODEL + "data: {target: workload.py:batches}\n" + LOSS,
        ("reading batch 1 raised KeyError: 'label'",),
        _workload("def batches():\n    yield from build_batches(1)\n    {}['label']\n"),
        blames_user_code=True,
    ),
    Broken(
        "batch of the wrong shape",
        MODEL + "data: {target: workload.py:build_batches, args: {width: 5}}\n" + LOSS,
        ("mat1 and mat2 shapes", "batch 0 holds [0]: float32 [8, 5]; [1]: int64 [8]"),
        blames_user_code=True,
    ),
    Broken(
        "batch the model does not take",
        MODEL + "data: {target: workload.py:batches}\n" + LOSS,
        ("unexpected keyword argument 'pixels'", "batch 0 holds ['pixels']: float32 [8, 4]"),
        _workload("batches = [{'pixels': torch.ones(8, 4)}]\n")
        | {"config.yaml": MODEL + "data: {target: workload.py:batches}\n"},
        blames_user_code=True,
    ),
    Broken("no loss", MODEL + DATA, ("the model Net: the loss has the shape [8, 2]", "Give a `loss`")),
    Broken(
        "output without a loss",
        "model: {target: workload.py:Dict}\n" + DATA,
        ("returned a dict with the keys logits", '.loss or ["loss"]'),
        _workload("class Dict(Net):\n    def forward(self, x):\n        return {'logits': super().forward(x)}\n"),
    ),
    Broken(
        "loss of another signature",
        MODEL + DATA + "loss: {target: workload.py:one}\n",
        ("config.yaml:3: loss", "cannot be called with (output, target)", "too many positional arguments"),
        _workload("def one(output):\n    return output.mean()\n"),
    ),
    Broken("loss not callable", MODEL + DATA + "loss: {target: 'math:pi'}\n", ("is a float", "loss(output, target)")),
    Broken(
        "loss without pairs",
        MODEL + "data: {target: workload.py:batches}\n" + LOSS,
        ("needs batches that are pairs", "gives a Tensor", "`step` target"),
        _workload("batches = [torch.ones(8, 4)]\n"),
    ),
    Broken(
        "loss not reduced", HEALTHY[:-2] + ", args: {reduction: none}}\n", ("the loss has the shape [8]", ".mean()")
    ),
    _step(
        "loss a number", "return {'loss': model(batch[0]).mean().item()}", ("the loss is a float", "a scalar tensor")
    ),
    _step(
        "loss detached",
        "loss = model(batch[0]).mean()\nreturn {'main': loss, 'aux': loss.detach()}",
        ("the loss 'aux' does not require a gradient",),
    ),
    _step("step returns nothing", "model(batch[0]).mean()", ("workload.py:step returned None", "a scalar tensor")),
    _step(
        "step raises",
        "return batch[7]",
        ("config.yaml:3: step.target: workload.py:step raised IndexError",),
        blames_user_code=True,
    ),
    _step(
        "torch.fft of half values, six of them",
        "return torch.fft.rfft(model(batch[0][:6]).half(), dim=0).abs().mean()",
        (
            "workload.py:step raised ",  # a RuntimeError, and without the emulation a NotImplementedError of torch 2.15
            "Error: ",
            "half only on CUDA, and only for powers of two",
            "cast it up first",
        ),
        blames_user_code=True,
    ),
    _more(
        "optimizer argument",
        "optimizer: {args: {learning_rate: 3e-4}}",
        ("config.yaml:4: optimizer.args", "no argument 'learning_rate'", "it takes lr"),
    ),
    Broken(
        "optimizer refuses",
        HEALTHY + "optimizer: {args: {lr: -1.0}}\n",
        ("torch.optim:AdamW raised ValueError: Invalid learning rate: -1.0",),
        blames_user_code=True,
    ),
    Broken(
        "no optimizer",
        HEALTHY + "optimizer: {target: workload.py:make}\n",
        ("workload.py:make gave a list", "torch.optim.Optimizer"),
        _workload("def make(params):\n    return params\n"),
    ),
    Broken(
        "optimizer of another model",
        HEALTHY + "optimizer: {target: workload.py:other}\n",
        ("the SGD holds no parameter of the model",),
        _workload("other = torch.optim.SGD(net.parameters())\n"),
    ),
    Broken(
        "optimizing by hand",
        "model: {target: workload.py:Manual}\n" + DATA,
        ("automatic_optimization is False",),
        _workload(
            "class Manual(Net):\n    automatic_optimization = False\n"
            "    def training_step(self, batch):\n        pass\n"
        ),
    ),
    Broken(
        "checkpoint no checkpoint",
        HEALTHY + "checkpoint: w.pt\n",
        ("config.yaml:4: checkpoint", "w.pt"),
        {"w.pt": b"these are no tensors"},
    ),
    Broken(
        "checkpoint no safetensors",
        HEALTHY + "checkpoint: w.safetensors\n",
        ("config.yaml:4: checkpoint", "w.safetensors is no safetensors file"),
        {"w.safetensors": b"these are no tensors"},
    ),
)

BROKEN: tuple[Broken, ...] = BROKEN_CONFIGS + BROKEN_WORKLOADS
