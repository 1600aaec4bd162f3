"""A weight outside every model, such as a temperature: a value made from it between two steps is data to the next."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import run_with_page

TEMPERATURE = scripts.loop("""
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
log_alpha = torch.zeros(1, requires_grad=True, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
other = torch.optim.SGD([log_alpha], lr=0.01)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
alpha = log_alpha.exp()
gain = net[0].weight.mean().exp()
for step in range(16):
    x = torch.randn(16, 8).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
        loss = ((alpha if sys.argv[1] == "beside" else gain) * out.float()).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    again = (log_alpha * out.detach().float().mean()).mean()
    other.zero_grad()
    scaler.scale(again).backward()
    scaler.step(other)
    scaler.update()
    alpha, gain = log_alpha.exp(), net[0].weight.mean().exp()
""")


@pytest.mark.parametrize("of", ["beside", "within"])
def test_a_step_is_compared_if_a_temperature_but_not_a_model_weight_scales_its_loss(tmp_path: Path, of: str) -> None:
    record, page, _ = run_with_page(tmp_path, TEMPERATURE, of)
    assert record.verdict == "healthy"
    of_first = page.partition("optimizer 0")[2].partition("optimizer 1")[0]
    assert ("agrees with FP32" in of_first) is (of == "beside")
    assert of == "beside" or "did not see every call that its loss needs" in page
