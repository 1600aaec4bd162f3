"""Scripts that trace, export, compile or copy the model they train: each gets the same result as without ampdbg."""

from pathlib import Path

import pytest
import torch

from ampdbg.source.ownership import AMPDBG
from tests.script import scripts
from tests.script.test_run import alone, run, steps_captured
from tests.siblings import slow_except

GRAPHS = """\
import copy, io, pickle, sys, warnings
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

warnings.filterwarnings("ignore", ".*is deprecated")  # of torch.jit; how often it is shown is another matter
warnings.showwarning = lambda message, category, *where: print(category.__name__, message)
torch.manual_seed(0)
wanted = sys.argv[1]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, track_running_stats=wanted == "trace")

    def forward(self, x):
        return x + self.b(torch.relu(self.norm(self.a(x))))

net = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
probe = torch.linspace(-1, 1, 128).reshape(16, 8)

def text(module):
    graph = module.inlined_graph.copy()
    torch._C._jit_pass_canonicalize(graph)
    return str(graph).replace("\\n", "")

def traced(**options):
    module = torch.jit.trace(net, probe, **options)
    return module(probe), text(module)

def exported(**options):
    made = torch.export.export(net, (probe,), **options)
    return [node.format_node() for node in made.graph.nodes], made.module()(probe)

def followed_by_name():
    graph = torch.fx.symbolic_trace(net)
    return graph.code, graph(probe)

def loaded():
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(probe), pickle.loads(pickle.dumps(net))(probe)

def copied():
    return copy.deepcopy(net)

def hooks(model):
    return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]

def penalty(weights):
    return torch.func.functional_call(net, weights, (probe,)).square().mean()

def clipped():
    return nn.utils.clip_grad_norm_(net.parameters(), 1e9)

WAYS = {
    "trace": traced,
    "export": exported,
    "strict export": lambda: exported(strict=True),
    "script": lambda: torch.jit.script(net)(probe),
    "fx": followed_by_name,
    "make_fx": lambda: make_fx(net)(probe).graph,
    "compile": lambda: torch.compile(net, backend="eager")(probe),
    "compiled clipping": lambda: torch.compile(clipped, backend="eager", fullgraph=True)(),
    "func": lambda: torch.func.grad(penalty)({name: one.detach() for name, one in net.named_parameters()}),
    "copies": lambda: (copied()(probe), len(hooks(copied())), loaded()),
}

def show(where):
    kept = copy.deepcopy(net.state_dict())
    made = WAYS[wanted]()
    with torch.no_grad():
        for name, value in net.state_dict().items():
            value.data.copy_(kept[name])
    print(where, made)

print("begins")
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
show("before")
for step in range(5):
    x = torch.randn(16, 8) * (float("inf") if step in (1, 2) else 1.0)
    optimizer.zero_grad()
    loss = net(x).square().mean()
    if step == 2 and wanted != "trace":  # it writes what the backward pass needs
        show("in a step")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step in (0, 1, 4):
        show("between steps")
    torch.save(net.state_dict(), "weights.pt")
print([value.tolist() for value in net.state_dict().values()])
"""
"""Step 2 is traced because step 1 fails."""

WAYS = "trace,export,strict export,script,fx,make_fx,compile,compiled clipping,func,copies".split(",")

COMPILES_NO_CLIPPING = torch.torch_version.TorchVersion(torch.__version__) < "2.11"
"""The compilers of torch 2.6 and 2.10 fail on compiled clipping, without ampdbg too."""

RUNS = [
    (way, *options)
    for way in WAYS
    for options in ((), ("--emulate",))
    if not (COMPILES_NO_CLIPPING and way == "compiled clipping")
]


def _undoubled(graphs: str) -> str:
    """Removes the detached copies for a backward pass: under any dispatch mode torch 2.6 makes each twice, unused."""
    return "\n".join(line for line in graphs.splitlines() if "target=torch.ops.aten.detach.default" not in line)


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS, ids="".join)
def test_graphs_and_copies_of_a_model_are_the_same_as_without_ampdbg(case: tuple[str, ...], tmp_path: Path) -> None:
    way, *options = case
    result, record = run(tmp_path, GRAPHS, way, options=tuple(options))
    assert _undoubled(result.stdout) == _undoubled(alone(tmp_path, str(tmp_path / "train.py"), way))
    assert result.stdout.count("between steps") == 3
    assert (record.steps_run, record.error) == (5, "")


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b((self.a(x).abs() + 1) * GAIN) / GAIN

"""

TRACES_ITS_MODEL = scripts.loop(f"""
{NET}
net = Net().cuda()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(6):
    x = torch.randn(16, 8).cuda()
    if str(step) in sys.argv[1:]:
        torch.jit.trace(net, x)
    with torch.autocast("cuda"):
        loss = net(x).square().mean()
    STEP
""")
"""The product overflows with a gain of 1e5, but not with 1.0."""


@pytest.mark.parametrize("gain", slow_except(["1e5"], ["1.0", "1e5"]))
def test_a_step_that_calls_jit_trace_on_its_model_is_replayed_and_captured(gain: str, tmp_path: Path) -> None:
    _, record = run(tmp_path, TRACES_ITS_MODEL.replace("GAIN", gain), "0")
    if gain == "1.0":
        assert (record.findings, steps_captured(record)) == ((), [])
    else:
        assert record.findings[0].code == "forward-overflow"
        assert (steps_captured(record), record.investigations[0].reach) == ([0], "whole")


MADE_ANEW = scripts.loop(f"""
{NET}
way, *trained = sys.argv[1:]
net = Net()
WAYS = {{
    "script": torch.jit.script,
    "trace": lambda net: torch.jit.trace(net, torch.randn(16, 8)),
    "fx": torch.fx.symbolic_trace,
}}
made = WAYS[way](net)
model = made if trained else net
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(6):
    x = torch.randn(16, 8) * (1.0 if step in (0, 5) else FACTOR)
    loss = model(x).square().mean()
    STEP
print([value.tolist() for value in net.state_dict().values()])
""")
"""A converted copy that shares the model's weights is trained in its place, or stays unused beside the model."""


@pytest.mark.slow
@pytest.mark.parametrize("trained", [(), ("made",)], ids=["the model", "what was made of it"])
@pytest.mark.parametrize("way", ["script", "trace", "fx"])
@pytest.mark.parametrize("factor", ["1.0", "1e38"])
def test_only_the_model_that_runs_is_watched_if_two_models_share_weights(
    way: str, trained: tuple[str, ...], factor: str, tmp_path: Path
) -> None:
    result, record = run(
        tmp_path, MADE_ANEW.replace("GAIN", "1e5").replace("FACTOR", factor), way, *trained, options=()
    )
    assert result.stdout == alone(tmp_path, str(tmp_path / "train.py"), way, *trained)
    assert (record.steps_run, record.error) == (6, "")
    named = {one.name for step in record.steps for group in step.groups for one in group.parameters}
    assert named == (set() if factor == "1.0" else {"a.weight", "a.bias", "b.weight", "b.bias"})


COMPILED = scripts.loop("""
import torch._dynamo.convert_frame as compiler
from torch import nn

way, graphs = sys.argv[1], []

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        if way == "break":
            os.getpid()
            print("", end="")
        return y.abs()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.a, self.b = Inner(), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(self.inner(x))
        return self.b((h @ h.transpose(-1, -2)) / 1e4 @ h)

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

def train(net, factors):
    if way == "model":
        net = torch.compile(net, backend=backend)
    if way == "in place":
        net.compile(backend=backend)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cuda", init_scale=1024.0)

    def loss(x):
        with torch.autocast("cuda"):
            return net(x).float().square().mean()

    def clipped(x):
        made = loss(x)
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        return made, torch.autograd.grad(made, list(net.parameters()))

    def step(x):
        scaler.scale(loss(x)).backward()
        taken()
        scaler.update()

    def taken():
        scaler.step(optimizer)

    if way in ("loss", "break"):
        loss = torch.compile(loss, backend=backend)
    if way == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend=backend)
    if way == "scaler":
        taken = torch.compile(taken, backend=backend)
    if way == "step" or (way == "late step" and 4000 not in factors):
        step = torch.compile(step, backend=backend)
    for factor in factors:
        optimizer.zero_grad()
        x = torch.ones(2, 6, 8) * factor
        if way == "gradients":
            torch.compile(clipped, backend=backend)(x)
        step(x)

train(Net(), (1, 1, *[4000] * 5))
train(Net(), (1, 1, *[4000] * 5))
train(Net(), (1, 1, 1))
codes = (held if hasattr(held, "co_name") else held() for held in compiler.input_codes.seen)
print(len(graphs), sorted({f"{code.co_filename}:{code.co_name}" for code in codes if code is not None}))
""")
"""Steps are replayed before further models are made. The last line prints the graph count and the compiled code."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["model", "in place", "loss", "break", "optimizer", "gradients", "scaler", "step", "late step"]
)
def test_torch_compile_compiles_the_script_and_no_code_of_ampdbg(way: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, COMPILED, way)
    assert record.script is not None
    assert (record.script.exit_code, record.error, len(record.steps)) == (0, "", 17)
    assert [len(timeline.steps) for timeline in record.timelines] == [7, 7, 3]
    graphs, codes = result.stdout.strip().split(" ", 1)
    assert int(graphs) > 0
    assert str(AMPDBG) not in codes


SETTLING = scripts.loop("""
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 4))
compiled = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=float(sys.argv[1]))
for step in range(10):
    x, y = torch.randn(16, 32), torch.randint(0, 4, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(compiled(x * (torch.inf if step in map(int, sys.argv[2:]) else 1.0)), y)
    STEP
    print(loss.item(), torch.cat([weight.flatten() for weight in net.parameters()]).double().sum().item())
""")
"""Its arguments: the initial loss scale, and the steps whose batch is multiplied by inf."""


@pytest.mark.slow
@pytest.mark.parametrize("given", [("1e7",), ("1024", "4"), ("1024", "4", "5", "6")])
def test_compiled_code_with_skipped_steps_gives_the_same_numbers_as_without_ampdbg(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    result, record = run(tmp_path, SETTLING, *given, options=())
    assert (record.error, record.steps_run, record.steps_skipped > 0) == ("", 10, True)
    assert record.steps[0].skipped == (len(given) == 1)
    assert result.stdout == alone(tmp_path, "train.py", *given)
    assert "uncompiled" not in result.stderr
    assert "global hooks" not in result.stderr


@pytest.mark.slow
def test_compiled_code_that_keeps_failing_is_replayed_whole_without_a_note(tmp_path: Path) -> None:
    given = ("1024", *map(str, range(3, 10)))
    result, record = run(tmp_path, SETTLING, *given, options=())
    assert [(made.step, made.reach) for made in record.investigations] == [(3, "whole")]
    assert [(found.code, found.step) for found in record.findings] == [("weights-nonfinite", 3), ("scale-collapse", 3)]
    assert record.unseen.notes == ()
    assert result.stdout == alone(tmp_path, "train.py", *given)


TRANSFORMED = scripts.loop("""
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)

    def forward(self, x):
        h = self.a(x)
        return h @ h.transpose(-1, -2) / 1e4

def pushed(x):
    return sum(jvp(net, (x,), (torch.ones_like(x),)))

def dual(x):
    with forward_ad.dual_level():
        return sum(forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x)))))

def dual_weights(x):
    with forward_ad.dual_level():
        weights = {name: forward_ad.make_dual(one, torch.ones_like(one)) for name, one in net.named_parameters()}
        return sum(forward_ad.unpack_dual(functional_call(net, weights, (x,))))

WAYS = {"jvp": pushed, "dual": dual, "dual weights": dual_weights, "vmap": lambda x: vmap(net)(x)}
net = Net()
optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
for factor in (1, 1, 1, 4000, 4000, 1, 1):
    with torch.autocast("cpu", torch.float16):
        loss = WAYS[sys.argv[1]](torch.ones(2, 6, 8) * factor).float().square().mean()
    STEP
print([value.tolist() for value in net.state_dict().values()])
""")
"""The zero tangents of forward-mode AD have no memory when a trace sees them."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jvp", "dual", "dual weights", "vmap"])
def test_forward_mode_ad_and_vmap_train_as_without_ampdbg(way: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, TRANSFORMED, way, options=())
    assert result.stdout == alone(tmp_path, str(tmp_path / "train.py"), way)
    assert (record.steps_run, record.error) == (7, "")
    assert (record.findings[0].code, record.findings[0].step) == ("unknown", 3)


COMPILED_STEP = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h + (h * gain @ (h * gain).t()).mean() * 1e-9)

gain, net = float(sys.argv[1]), Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
step = torch.compile(optimizer.step if sys.argv[2] == "step" else lambda: optimizer.step(), backend="aot_eager")
for _ in range(12):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(torch.randn(8, 8).cuda()).float().square().mean()
    loss.backward()
    step()
    print(loss.item())
""")
"""Its arguments: the factor before the product, and what is compiled: the optimizer's step or a function with it."""


@pytest.mark.parametrize(
    ("gain", "found", "way"),
    [
        ("900", ["forward-overflow"], "step"),
        pytest.param("900", ["forward-overflow"], "function", marks=pytest.mark.slow),
        pytest.param("1", [], "step", marks=pytest.mark.slow),
        pytest.param("1", [], "function", marks=pytest.mark.slow),
    ],
)
def test_a_step_before_a_compiled_optimizer_step_is_replayed(
    gain: str, found: list[str], way: str, tmp_path: Path
) -> None:
    result, record = run(tmp_path, COMPILED_STEP, gain, way)
    (made,) = record.investigations
    assert (made.step == 0) is bool(found)
    causes = [(one.code, one.op) for one in record.findings if not one.code.startswith("misuse")]
    assert causes == [(code, "aten.mm.default") for code in found]
    assert record.unseen.notes == ()
    assert "get_ident" not in result.stderr
    assert "recompile_limit" not in result.stderr
    assert result.stdout == run(tmp_path, COMPILED_STEP, gain, way, options=("--emulate", "--no-watch"))[0].stdout
