"""``ampdbg run`` on scripts that replace an optimizer's step, nest steps, or update weights in the backward pass."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import assert_unwatched_saves_the_same, first_finding, run_with_page
from tests.siblings import slow_except

OWN = scripts.loop("""
import types

net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

def descend(self, closure=None):
    with torch.no_grad():
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])

optimizer.step = types.MethodType(descend, optimizer)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled={scales})
for step in range(12):
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(torch.randn(8, 16).cuda())
        far = {gain} if step > 5 else 1.0
        loss = (out * far / far).float().square().mean()
    STEP
torch.save(net.state_dict(), "net.pt")
""")


@pytest.mark.parametrize("scales", [True, False])
def test_steps_of_a_replaced_step_method_are_counted_and_save_the_same_weights(tmp_path: Path, scales: bool) -> None:
    record, page, _ = run_with_page(tmp_path, OWN.format(scales=scales, gain=1.0))
    assert (len(record.steps), record.steps_skipped, "saw no optimizer step" in page) == (12, 0, False)
    assert_unwatched_saves_the_same(tmp_path)


@pytest.mark.parametrize("scales", [True, False])
def test_an_overflow_after_six_steps_of_a_replaced_step_method_is_named(tmp_path: Path, scales: bool) -> None:
    record, _, code = run_with_page(tmp_path, OWN.format(scales=scales, gain=1e6))
    assert (code, first_finding(record)[:2]) == (1, ("forward-overflow", 6))
    assert [step.skipped for step in record.steps] == [False] * 6 + [scales] * 6


INSIDE = scripts.loop("""
class Masters(torch.optim.AdamW):
    def __init__(self, params):
        super().__init__(params, lr=1e-3)
        own = [one for group in self.param_groups for one in group["params"]]
        self.copies = {one: one.detach().float().clone().requires_grad_() for one in own}
        self.inner = torch.optim.AdamW(self.copies.values(), lr=1e-3)

    def step(self, closure=None):
        for own, copy in self.copies.items():
            copy.grad = own.grad.float()
        self.inner.step()
        with torch.no_grad():
            for own, copy in self.copies.items():
                own.copy_(copy)

net = nn.Linear(8, 1).bfloat16()
optimizer = Masters(net.parameters())
for step in range(30):
    loss = net(torch.randn(4, 8).bfloat16()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(net.state_dict(), "net.pt")
""")


def test_a_nested_optimizer_step_counts_once_and_its_master_weights_are_found(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, INSIDE, options=())
    assert (code, record.verdict, len(record.steps)) == (0, "healthy", 30)
    assert "Healthy: none of 30 steps skipped" in page
    assert page.count("step 10 agrees with FP32") == 1
    assert [(one.kind, one.masters, one.states) for one in record.dtypes] == [
        ("linears", ("float32",), ("float32",)),
        ("biases", ("float32",), ("float32",)),
    ]


HOLDERS = scripts.loop("""
net = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

def update(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None

for parameter in net.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(30):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (net(torch.randn(4, 8)) * ({gain} if step > 5 else 1.0)).square().mean()
    loss.backward()
""")


@pytest.mark.parametrize("gain", [1.0, 1e30])
def test_weight_updates_in_backward_hooks_count_each_pass_as_a_step(tmp_path: Path, gain: float) -> None:
    record, page, code = run_with_page(tmp_path, HOLDERS.format(gain=gain), options=())
    found = [("unknown", 6)] * (gain > 1.0)
    assert (code, [(one.code, one.step) for one in record.findings]) == (len(found), found)
    assert (len(record.steps), record.steps_skipped, record.investigations) == (30, 0, ())
    assert "no step was compared with FP32" in page or found
    assert "in hooks of the backward pass: each pass then counts as a step, and none is compared with FP32" in page


BY_HAND = scripts.loop("""
gain, how = float(sys.argv[1]), sys.argv[2]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = torch.relu(self.a(x)) * gain
        gram = h @ h.transpose(-1, -2)
        return self.o(h / gain) + gram.mean() * 1e-9

net = Net().cuda()
weights, scale = list(net.parameters()), 1024.0
optimizer = torch.optim.SGD(weights, lr=0.05)

def loss_of(x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return nn.functional.cross_entropy(net(x), y)

def of_values(values, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return nn.functional.cross_entropy(torch.func.functional_call(net, values, (x,)), y)

for step in range(14):
    x, y = torch.randn(8, 16).cuda(), torch.randint(8, (8,)).cuda()
    if how == "func":
        values = {name: value.detach() for name, value in net.named_parameters()}
        gradients = torch.func.grad(of_values)(values, x, y).values()
    else:
        loss = loss_of(x, y)
        if how == "weighs":  # a balance of losses reads gradients of weights, and keeps the graph
            torch.autograd.grad(loss, weights[-1], retain_graph=True)
        if how == "learns":  # first-order meta-learning: the loss of weights that are one step on
            first = torch.autograd.grad(loss, weights)
            ahead = [weight - 0.01 * one for weight, one in zip(weights, first)]
            loss = of_values(dict(zip(dict(net.named_parameters()), ahead)), x, y)
        if how in ("grad", "skips", "descends"):
            gradients = [one / scale for one in torch.autograd.grad(loss * scale, weights)]
        else:
            (loss * scale).backward()
            gradients = [one.grad / scale for one in weights]
    if how == "skips" and not all(one.isfinite().all() for one in gradients):
        continue
    if how in ("descends", "clears"):
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight.sub_(gradient, alpha=0.05)
                weight.grad = None
        continue
    if how == "climbs":  # sharpness-aware: a step up, and the gradients there
        before = [one.detach().clone() for one in weights]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight.add_(gradient, alpha=0.05)
        optimizer.zero_grad()
        (loss_of(x, y) * scale).backward()
        gradients = [one.grad / scale for one in weights]
        for weight, value in zip(weights, before):
            weight.data = value
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    optimizer.step()
    if how in ("climbs", "weighs", "learns"):
        optimizer.zero_grad()
torch.save(net.state_dict(), "net.pt")
""")

GRAM = ("forward-overflow", 0, "", "gram = h @ h.transpose(-1, -2)")


@pytest.mark.parametrize(
    "how",
    slow_except(["grad", "descends", "climbs"], ["grad", "skips", "descends", "clears", "climbs", "weighs", "learns"]),
)
def test_an_overflow_is_named_however_the_loop_puts_gradients_into_the_weights(tmp_path: Path, how: str) -> None:
    record, _, code = run_with_page(tmp_path, BY_HAND, "400", how)
    assert (code, record.verdict, first_finding(record)) == (1, "precision", GRAM)
    assert (len(record.steps), record.steps_skipped) == (14, 14 * (how == "skips"))
    assert [finding.code for finding in record.findings if "misuse" not in finding.code] == ["forward-overflow"]
    assert_unwatched_saves_the_same(tmp_path, "400", how)


@pytest.mark.parametrize(
    "how",
    slow_except(["grad", "climbs"], ["grad", "skips", "descends", "clears", "climbs", "weighs", "learns", "func"]),
)
def test_a_healthy_loop_that_places_its_gradients_itself_has_no_findings(tmp_path: Path, how: str) -> None:
    record, page, code = run_with_page(tmp_path, BY_HAND, "1", how)
    assert (code, record.findings, len(record.steps), record.steps_skipped) == (0, (), 14, 0)
    assert ("step 10 agrees with FP32" in page) == (how in ("grad", "skips", "weighs", "learns"))
    assert_unwatched_saves_the_same(tmp_path, "1", how)


def test_nan_weights_by_gradients_of_torch_func_are_unknown_at_the_first_step(tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, BY_HAND, "400", "func")
    assert (code, record.verdict, record.steps_skipped) == (1, "inconclusive", 0)
    assert [(one.code, one.step, one.severity) for one in record.findings] == [("unknown", 0, "error")]
    assert record.findings[0].message.startswith("gradients are not finite at step 0, and a.weight holds 1024 NaN")


NO_OPTIMIZER = BY_HAND.replace("optimizer = torch.optim.SGD(weights, lr=0.05)", "")


@pytest.mark.parametrize(("gain", "found"), [("400", [("unknown", 0)]), ("1", [])])
def test_a_lost_loss_whose_gradients_the_script_applies_without_an_optimizer_is_not_skipped(
    tmp_path: Path, gain: str, found: list[tuple[str, int]]
) -> None:
    record, page, code = run_with_page(tmp_path, NO_OPTIMIZER, gain, "descends")
    assert (code, [(one.code, one.step) for one in record.findings]) == (len(found), found)
    assert (record.steps_skipped, "although the loss was" in page) == (0, False)


ACCELERATED = scripts.loop("""
import types
from accelerate import Accelerator

class Lazy(types.ModuleType):  # as a library's, for what is not installed
    def __getattr__(self, name):
        raise ImportError(name)

sys.modules["lazy"] = Lazy("lazy")
accelerator, model = Accelerator(mixed_precision="fp16"), nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20, end_factor=0.0)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for step in range(14):
    x = torch.randn(16, 8, device="cuda") * 3
    optimizer.zero_grad()
    loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean() * (300 if step in (0, 9) else 1)
    accelerator.backward(loss)
    optimizer.step()  # notes if the scaler calls the step of the optimizer
    scheduler.step()  # only if it does
torch.save(model.state_dict(), "net.pt")
""")


def test_a_replay_does_not_call_the_step_that_a_library_has_set_on_an_optimizer(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, ACCELERATED)
    assert (first_finding(record)[0], record.steps[9].skipped) == ("scale-calibration", True)
    assert_unwatched_saves_the_same(tmp_path)
