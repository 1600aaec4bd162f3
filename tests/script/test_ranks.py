"""Scripts of several processes: each finds its own faults, captures its own steps, and none waits for another."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.optim import ZeroRedundancyOptimizer

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from ampdbg.script.launch import launched_as
from ampdbg.script.ranks import alone, has_its_state, hooks_half_weights, why_in_parts
from tests.commands.program import command, environment, start
from tests.script.scripts import DISTRIBUTED

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="a build of torch without torch.distributed")


@dataclass(frozen=True)
class Ended:
    """How two processes ended: their exit codes, the weights that both printed, and their records by rank.

    Gloo may print into the same line, as it writes through another stream.
    """

    codes: tuple[int, ...]
    weights: list[str]
    stderr: str
    records: tuple[Record, ...]


def both(folder: Path, bad: str, *options: str, launcher: tuple[str, ...] = (), text: str = DISTRIBUTED) -> Ended:
    """Runs two processes of the script, which overflows on the ranks ``bad`` in the first three steps."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    program = command("run", "--emulate", *options, "train.py", bad)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    ranks = [{}] if launcher else [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"} for rank in "01"]
    started = [
        subprocess.Popen(
            [*launcher, *program],
            cwd=folder,
            env=environment(**at, **rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in ranks
    ]
    said = [process.communicate() for process in started]
    records = (folder / name for name in ("r.json", "r-rank-1.json"))
    return Ended(
        tuple(process.returncode for process in started),
        sorted(found for out, _ in said for found in re.findall(r"weights \d [-+.\de]+", out)),
        "".join(err for _, err in said),
        tuple(read_record(path) for path in records if path.exists()),
    )


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python")


@pytest.mark.slow
def test_only_the_failing_rank_of_two_is_named_and_captured(tmp_path: Path) -> None:
    ended = both(tmp_path, "1", "--record=r.json", launcher=TORCHRUN)
    assert ended.codes == (0,), ended.stderr  # else torchrun ends the other rank, which may still be saving
    first, second = ended.records
    fault = second.findings[0]
    assert (fault.code, fault.module, fault.op, fault.step) == ("forward-overflow", "attention", "aten.bmm.default", 0)
    assert fault.source is not None
    assert fault.source.text == "scores = h @ h.transpose(-1, -2)"
    assert second.script is not None
    assert (second.script.rank, second.script.processes) == (1, 2)
    assert f"rank 1 found {fault.code} in attention at step 0: ampdbg report r-rank-1.json\n" in ended.stderr
    assert ended.stderr.count("Record: ") == 1

    assert first.script is not None
    assert first.script.captures == ()
    assert "forward-overflow" not in {finding.code for finding in first.findings}
    assert [made.is_of_others for made in first.investigations] == [True]
    assert [producer for made in first.investigations for producer in made.low.producers] == []

    (capture,) = map(Path, second.script.captures)
    assert capture.name.endswith("-step-0-rank-1.safetensors")
    replayed = start(tmp_path, "replay", str(capture), "--record=c.json")
    again = read_record(tmp_path / "c.json")
    found = again.findings[0]
    assert (replayed.code, found.code, found.module, found.source) == (1, fault.code, fault.module, fault.source)
    assert again.investigations[0].reproduced == 5
    assert "captured on rank 1 of 2: a replay does not average its gradients with the others" in again.unseen.notes

    bare = both(tmp_path, "1", "--no-watch")
    assert bare.codes == (0, 0)
    assert len(bare.weights) == 2
    assert bare.weights == ended.weights


@pytest.mark.slow
def test_a_step_that_waits_for_other_ranks_is_not_replayed(tmp_path: Path) -> None:
    line = "scores = h @ h.transpose(-1, -2)"
    text = DISTRIBUTED.replace(line, f"torch.distributed.all_reduce(h.detach().float().mean())\n        {line}")
    ended = both(tmp_path, "1", "--record=r.json", "--fail-on=never", text=text)
    assert ended.codes == (0, 0), ended.stderr
    notes = [note for record in ended.records for note in record.unseen.notes]
    assert any("it waits for other processes, in c10d.allreduce_.default" in note for note in notes)
    assert all("forward-overflow" not in {found.code for found in record.findings} for record in ended.records)


@pytest.mark.slow
def test_a_fault_of_all_ranks_is_named_and_captured_by_each(tmp_path: Path) -> None:
    ended = both(tmp_path, "01", "--record=r.json", "--fail-on=warning")
    assert ended.codes == (1, 1)
    for record in ended.records:
        assert record.script is not None
        assert [finding.module for finding in record.findings if finding.code == "forward-overflow"] == ["attention"]
        assert len(record.script.captures) == 1
        assert not any(made.is_of_others for made in record.investigations)
    assert len({*(tmp_path / ".ampdbg" / "captures").iterdir()}) == 2


@pytest.mark.slow
def test_healthy_ranks_are_reported_once_and_train_the_same_weights_as_unwatched(tmp_path: Path) -> None:
    watched, bare = both(tmp_path, "none", "--trend=2"), both(tmp_path, "none", "--no-watch")
    assert (watched.codes, bare.codes) == ((0, 0), (0, 0))
    assert len(bare.weights) == 2
    assert watched.weights == bare.weights
    assert "rank 1" not in watched.stderr
    assert watched.stderr.count("No fault found") == 1
    names = {path.name.partition("-")[2] for path in (tmp_path / ".ampdbg").glob("*-run*")}
    assert names == {"run.json", "run.jsonl", "run-rank-1.json", "run-rank-1.jsonl"}
    latest = read_record(tmp_path / ".ampdbg" / "latest.json")
    assert latest.script is not None
    assert latest.script.rank == 0


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"WORLD_SIZE": "4"}, (0, 1)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, (0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "x"}, (0, 1)),
    ],
)
def test_rank_and_world_size_are_read_from_the_variables_of_the_launcher(
    given: dict[str, str], known: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launched_as() == known


def test_a_single_process_script_gets_its_own_process_group() -> None:
    environ, init = dict(os.environ), distributed.init_process_group
    with pytest.raises(ValueError, match="undone"):
        _in_a_group_alone()
    assert (dict(os.environ), distributed.init_process_group) == (environ, init)


def _in_a_group_alone() -> None:
    with alone(has_launcher=True):
        distributed.init_process_group("gloo", init_method="tcp://10.255.255.1:1", world_size=64, rank=7)
        try:
            assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
            assert os.environ["WORLD_SIZE"] == "1"
            parameters = [nn.Parameter(torch.ones(2))]
            whole, sharded = torch.optim.AdamW(parameters), ZeroRedundancyOptimizer(parameters, torch.optim.AdamW)
            assert (has_its_state(whole), has_its_state(sharded)) == (True, False)
            whole.register_state_dict_post_hook(lambda optimizer, state: state)
            assert not has_its_state(whole)
        finally:
            distributed.destroy_process_group()
        raise ValueError("undone")


def test_a_single_process_script_without_a_launcher_opens_no_port() -> None:
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as taken, alone(has_launcher=False):
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        distributed.init_process_group("gloo", init_method=address, world_size=1, rank=0)
        assert distributed.get_world_size() == 1
        distributed.destroy_process_group()
        assert dict(os.environ) == before


def test_sharded_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert why_in_parts(model) == ""
    vars(model[1].weight)["_is_flat_param"] = True
    assert why_in_parts(model).startswith("1.weight is a sharded or wrapped tensor")


SHARDED = """
import sys, torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

way, gain = sys.argv[1], float(sys.argv[2])
store = distributed.HashStore()
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
if way == "FSDP1":
    policy = MixedPrecision(param_dtype=torch.float16)
    net = FullyShardedDataParallel(net, mixed_precision=policy, use_orig_params=True, device_id=torch.device("cpu"))
else:
    fully_shard(net, **({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)} if way == "policy" else {}))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(14):
    x, y = torch.randn(8, 16), torch.randint(8, (8,))
    with torch.autocast("cpu", dtype=torch.float16, enabled=way == "autocast"):
        h = net(x)
        loss = nn.functional.cross_entropy(h.float(), y) + ((h * gain) @ (h * gain).t()).float().mean() * 1e-9
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", step, loss.item(), flush=True)
distributed.destroy_process_group()
"""


WITH_FSDP = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has none for a CPU")


@WITH_FSDP
@pytest.mark.parametrize("gain", ["1", pytest.param("900", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["policy", "autocast", pytest.param("FSDP1", marks=pytest.mark.slow)])
def test_a_failing_step_under_fsdp_or_its_policy_is_not_replayed_and_training_is_unchanged(
    tmp_path: Path, way: str, gain: str
) -> None:
    (tmp_path / "train.py").write_text(SHARDED, encoding="utf-8")
    watched, plain = (
        start(tmp_path, "run", "--captures=captures", *options, "train.py", way, gain)
        for options in (("--record=r.json",), ("--no-watch",))
    )
    assert watched.stdout == plain.stdout
    assert watched.stdout.count("loss") == 14
    record, is_replayed = read_record(tmp_path / "r.json"), (way, gain) == ("autocast", "1")
    is_refused = any("FSDP gathers its weights or casts them" in note for note in record.unseen.notes)
    assert (is_refused, len(record.investigations)) == (not is_replayed, int(is_replayed))


@WITH_FSDP
@pytest.mark.slow
def test_a_capture_of_sharded_weights_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED, encoding="utf-8")
    start(tmp_path, "run", "--record=r.json", "--capture-step=3", "train.py", "autocast", "1")
    (note,) = read_record(tmp_path / "r.json").unseen.notes
    refusal = "0.weight is a sharded or wrapped tensor, and a capture holds only whole, plain ones"
    assert note == f"step 3 was not captured: {refusal}"


def test_half_weights_with_gradient_hooks_are_detected_only_in_a_process_group() -> None:
    def lone() -> nn.Linear:
        return nn.Linear(2, 2).bfloat16()

    from torch._C._distributed_c10d import HashStore  # not in every build of torch

    hooked, fired = lone(), list[int]()
    sums = get_gradient_edge(hooked.weight).node  # as Megatron and picotron hold them
    sums.register_hook(lambda *_: fired.append(1))
    assert not hooks_half_weights(hooked)  # there is no process group
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(lone())
        models = (lone(), hooked, wrapper, wrapper.module)
        assert [hooks_half_weights(model) for model in models] == [False, True, True, True]
        assert not hooks_half_weights(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        distributed.destroy_process_group()
    hooked(torch.ones(1, 2).bfloat16()).sum().backward()
    assert fired == [1]
