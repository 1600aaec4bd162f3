"""``ampdbg run`` on scripts that replace an optimizer's step, nest steps, or update weights in the backward pass."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import assert_unwatched_saves_the_same, first_finding, run_with_page

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
def test_weight_updates_in_backward_hooks_are_reported_as_no_optimizer_step(tmp_path: Path, gain: float) -> None:
    record, page, _ = run_with_page(tmp_path, HOLDERS.format(gain=gain), options=())
    assert (record.verdict, record.steps, record.findings) == ("inconclusive", (), ())
    assert "ampdbg saw no optimizer step." in page
    assert "it follows no loop that writes weights itself, as in hooks of the backward pass" in page


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
