"""x"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as torchs

import ampdbg
from tests.script import scripts
from tests.siblings import slow_but_for

TRACED_ENDINGS = {
    "to its end": "",
    "with an error while a step is traced": "raise ValueError('bad')",
    "with a code while a step is traced": "raise SystemExit(3)",
    "by an interrupt while a step is traced": "raise KeyboardInterrupt",
}


def replaced_by_a_run() -> list[object]:
    """What a run replaces meanwhile."""
    scaler, cuda = torch.amp.GradScaler, torch.cuda
    functions = [scaler.scale, scaler.step, scaler.update, vars(torch.autograd)["_engine_run_backward"]]
    functions += [torch.Tensor.cuda, torch.optim.Optimizer.__init__]
    functions += [cuda.is_available, cuda.device_count, cuda.get_rng_state_all]
    of_steps = (torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks)
    hooks = [*map(id, of_steps), *(len(each.values()) for each in of_steps), torch._C._len_torch_dispatch_stack()]
    process = [sys.argv, sys.path[:], sys.modules["__main__"], signal.signal, signal.getsignal]
    process += [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    return [*functions, *hooks, *process]


@pytest.mark.parametrize("how", slow_but_for(["to its end", "with a code while a step is traced"], TRACED_ENDINGS))
def test_torch_and_the_process_are_as_they_were(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ending = TRACED_ENDINGS[how]
    text = scripts.LOSS_LINE.replace("GAIN", "1000.0")
    text = text.replace("for _ in range(7):", "sys.modules['held'] = net\nfor step in range(7):")
    (tmp_path / "train.py").write_text(f"{text}    if step == 1:\n        {ending or 'pass'}\n", encoding="utf-8")
    before = replaced_by_a_run()
    record = ampdbg.run(tmp_path / "train.py", emulate=True)
    assert replaced_by_a_run() == before
    model = sys.modules.pop("held")
    assert isinstance(model, torch.nn.Module)
    modules = list(model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert record.steps_run == (2 if ending else 7)
    assert record.interrupted is ("KeyboardInterrupt" in ending)
    assert ("ValueError: bad" in capfd.readouterr().err) is ("ValueError" in ending)
