"""The pages for operators: their sizes are those that are allocated, and scripts, manifests, rules and recoveries work as printed."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from racing import PATIENCE, until
from states import difference
from torch import nn

import async_ckpt
from async_ckpt import AsyncCheckpointer
from async_ckpt.core.runs.run import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="schedulers and shells as Linux has them")

ROOT = Path(__file__).parent.parent
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("schedulers", "recovery", "operations"))
BLOCKS = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, flags=re.M | re.S))
ALERTS = ["CheckpointTooOld", "CheckpointsFail", "CheckpointStallHigh", "CheckpointBandwidthLow", "StorageSpaceLow"]
MIB = 2**20


def tool(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and a PATH with `python` and `async-ckpt`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "python", f'exec {sys.executable} "$@"')
    program(programs / "async-ckpt", f'exec {sys.executable} -m async_ckpt "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def program(path: Path, text: str, interpreter: str = "/bin/sh") -> None:
    path.write_text(f"#!{interpreter}\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def shell(*commands: str, status: int = 0) -> str:
    """What bash prints; it ends with the first command that does not succeed."""
    script = "\n".join(("set -euo pipefail", *commands))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout


def write_script(name: str) -> None:
    Path(name).write_text(BLOCKS[name], encoding="utf-8")


# --- sizing --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizing() -> dict[str, Any]:
    """The functions of the page, and what it prints as `rows`."""
    names: dict[str, Any] = {}
    block = re.search(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert block is not None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block[1], names)
    return names | {"rows": printed.getvalue()}


def test_the_table_shows_what_the_formulas_give(sizing):
    assert sizing["rows"] in PAGE


def trained() -> dict[str, Any]:
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(30)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}


def tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(tensor_bytes, values))


@pytest.mark.parametrize(
    "state",
    [
        {"weight": torch.zeros(70 * MIB, dtype=torch.uint8)},
        {"model": {f"model.layers.{n}.{'x' * 80}.weight": torch.zeros(3) for n in range(3000)}},
        trained(),
    ],
    ids=["one large tensor", "many small ones with long names", "a training"],
)
def test_an_archive_has_at_most_the_size_of_the_formula(state, sizing, tmp_path):
    report = async_ckpt.save(state, tmp_path / "x.tar").result()
    num_state_bytes = tensor_bytes(async_ckpt.load(tmp_path / "x.tar"))
    assert num_state_bytes < report.num_bytes <= sizing["archive_bytes"](num_state_bytes, report.num_tensors)


def test_the_memory_for_a_snapshot_is_that_of_the_formula(sizing, tmp_path):
    state = {"weight": torch.zeros(70 * MIB, dtype=torch.uint8)}
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.prewarm(state)
        before = ckpt.metrics()["pool_bytes"]
        report = ckpt.save(state, step=1).result()
        assert before == ckpt.metrics()["pool_bytes"] == sizing["host_memory_bytes"](report.num_bytes) == 96 * MIB


def test_several_saves_under_way_take_at_most_the_memory_of_the_formula(sizing, tmp_path):
    state = {"weight": torch.zeros(40 * MIB, dtype=torch.uint8)}
    with AsyncCheckpointer(tmp_path, max_in_flight=2) as ckpt:
        handles = [ckpt.save(state, step=step) for step in range(4)]
        num_bytes = handles[-1].result().num_bytes
        pool_bytes = ckpt.metrics()["pool_bytes"]
    assert pool_bytes <= sizing["host_memory_bytes"](num_bytes, max_in_flight=2) == 128 * MIB


def test_a_budget_is_never_passed(tmp_path):
    with AsyncCheckpointer(tmp_path, host_bytes=32 * MIB) as ckpt:
        ckpt.save({"weight": torch.zeros(70 * MIB, dtype=torch.uint8)}, step=1).result()
        assert 0 < ckpt.metrics()["pool_bytes"] <= 32 * MIB


def test_a_root_takes_at_most_the_room_of_the_formula(sizing, tmp_path, monkeypatch):
    retain, seen = Run.retain, []

    def look_first(self: Run, *arguments: Any, **options: Any) -> list[int]:
        seen.append(sum(path.stat().st_size for path in tmp_path.rglob("*.tar")))
        return retain(self, *arguments, **options)

    monkeypatch.setattr(Run, "retain", look_first)
    with AsyncCheckpointer(tmp_path, keep=2) as ckpt:
        for step in range(5):
            report = ckpt.save({"weight": torch.zeros(MIB)}, step=step).result()
            ckpt.wait()
    assert max(seen) == sizing["storage_bytes"](report.num_bytes, keep=2) == 3 * report.num_bytes


def test_a_step_of_one_rank_is_two_objects(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save({"weight": torch.zeros(3)}, step=1).result()
    assert len([*(tmp_path / "step_00000001").iterdir()]) == 2


# --- recipes -------------------------------------------------------------------------------------------------------

SRUN = """
import os, signal, subprocess, sys, time

command = sys.argv[sys.argv.index("bash"):]
ranks = [
    subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    for rank in range(int(os.environ["SLURM_NTASKS"]))
]
if "SENDS" in os.environ:  # as --signal says
    deadline = time.monotonic() + 100
    while not os.path.exists("runs/a/latest") and time.monotonic() < deadline and ranks[0].poll() is None:
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(int(os.environ["SENDS"]))
sys.exit(max(status if status >= 0 else 128 - status for status in [rank.wait() for rank in ranks]))
"""

SCONTROL = """
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


def free_port(ports: Iterable[int] = (0,)) -> int:
    """The first of these ports that is free; 0 stands for any."""
    for port in ports:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise OSError("no port is free")


def slurm_job(**env: object) -> int:
    """Run the script as Slurm would, and return its exit status."""
    job = {
        "SLURM_JOB_ID": free_port(range(20_000 + os.getpid() % 9000, 30_000)) - 20_000,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": 2,
        "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
        **env,
    }
    environment = {**os.environ, **{name: str(value) for name, value in job.items()}}
    return subprocess.run(["bash", "train.sbatch"], env=environment, timeout=4 * PATIENCE, check=False).returncode


def test_the_script_for_slurm_saves_before_the_time_limit_is_requeued_and_goes_on(here):
    """A stand-in of srun starts four ranks, and sends each the signal that the script asks for; two go on."""
    write_script("train.py")
    write_script("train.sbatch")
    program(here / "bin" / "srun", SRUN, sys.executable)
    program(here / "bin" / "scontrol", SCONTROL)
    subprocess.run(["bash", "-n", "train.sbatch"], check=True)
    asked = re.search(r"--signal=(\w+)@", BLOCKS["train.sbatch"])
    assert asked is not None

    assert slurm_job(SLURM_NTASKS=4, STEPS=10**9, SENDS=int(signal.Signals[f"SIG{asked[1]}"])) == 75
    assert len((here / "requeued").read_text().split()) == 1
    newest = AsyncCheckpointer("runs/a").latest()
    assert newest is not None
    assert newest > 500  # of the signal, after the first that was due by its number

    assert slurm_job(SLURM_NTASKS=2, STEPS=newest + 501) == 0  # two ranks train from there to the next step that is due
    assert len((here / "requeued").read_text().split()) == 1
    steps = AsyncCheckpointer("runs/a").steps()
    assert steps[-2:] == [newest, newest // 500 * 500 + 500]


def documents(name: str) -> Any:
    return pytest.importorskip("yaml", reason="PyYAML is not installed").safe_load(BLOCKS[name])


def env_of(job: dict[str, Any]) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_a_pod_of_the_job_saves_at_sigterm_and_ends_with_the_status_that_is_no_failure(here):
    write_script("train.py")
    job = documents("job.yaml")
    pod = [sys.executable, "train.py"]  # the first process of the container, without a shell
    env = {**os.environ, **env_of(job), "MASTER_PORT": str(free_port()), "STEPS": str(10**9), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(pod, env=env)
    until(lambda: Path("runs/a/latest").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    status = process.wait(timeout=2 * PATIENCE)
    (ignored, _) = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored["onExitCodes"]["values"] == [status] == [75]
    assert (AsyncCheckpointer("runs/a").latest() or 0) > 500


def jobs() -> dict[str, dict[str, Any]]:
    (ranks,) = documents("jobset.yaml")["spec"]["replicatedJobs"]
    nested = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "nested"},
        "spec": ranks["template"]["spec"],
    }
    return {"job.yaml": documents("job.yaml"), "jobset.yaml": nested}


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_the_jobs_are_as_the_schemas_of_kubernetes_say(name):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    job = jobs()[name]
    kubernetes.validate(job, "1.34", strict=True)
    job["spec"]["backofLimit"] = 3
    with pytest.raises(kubernetes.ValidationError, match="backofLimit"):
        kubernetes.validate(job, "1.34", strict=True)


def test_the_ranks_of_the_jobset_find_each_other():
    """Names of hosts are <jobset>-<replicated job>-<job index>-<pod index>.<jobset>."""
    jobset = documents("jobset.yaml")
    (ranks,) = jobset["spec"]["replicatedJobs"]
    env, job = env_of(jobs()["jobset.yaml"]), ranks["template"]["spec"]
    name = jobset["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-{ranks['name']}-0-0.{name}"
    assert int(env["WORLD_SIZE"]) == job["completions"] == job["parallelism"]
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    assert jobset["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


# --- lifecycle rules -----------------------------------------------------------------------------------------------


def test_a_bucket_takes_the_lifecycle_rules(s3, bucket):
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        region_name="us-east-1",
        aws_access_key_id=s3.options["access_key_id"],
        aws_secret_access_key=s3.options["secret_access_key"],
    )
    rules = json.loads(BLOCKS["lifecycle.json"])
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    kept = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert {rule["ID"]: rule for rule in kept} == {rule["ID"]: rule for rule in rules["Rules"]}


def test_the_rule_for_google_is_json():
    (rule,) = json.loads(BLOCKS["lifecycle-google.json"])["rule"]
    assert rule["action"]["type"] == "AbortIncompleteMultipartUpload"


# --- recovery by hand ----------------------------------------------------------------------------------------------


def recovered(name: str) -> Any:
    return torch.load(name, weights_only=True)


def by_plain_types(value: Any) -> Any:
    """A state with plain dicts, and tensors in place of arrays."""
    if isinstance(value, dict):
        return {key: by_plain_types(item) for key, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value


def test_a_step_of_one_rank_is_recovered_by_hand(here):
    tool("jq")
    model, ref = nn.Linear(64, 64), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "ref": ref, "tied": [model.weight], "epoch": 7, "note": None}
    with AsyncCheckpointer("runs/a") as ckpt:
        for step in (100, 200):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            ckpt.save(state, step, unchanged="ref", record={"loss": 0.25}).result()

    listed = shell(BLOCKS["one rank"], BLOCKS["borrowed groups"])
    assert '"step": 200' in listed
    assert '"loss": 0.25' in listed
    assert "optimizer.state.0.exp_avg\tfloat32\t[64,64]" in listed.splitlines()
    for name in ("load_model.py", "recover.py"):
        write_script(name)
    assert f"{model.weight.norm().item():.4f}" in shell("python load_model.py")
    assert shell(BLOCKS["rebuild"]).split() == ["model", "optimizer", "tied", "epoch", "note"]

    saved = by_plain_types(async_ckpt.load("runs/a"))
    saved_ref = saved.pop("ref")
    assert difference(saved, recovered("recovered.pt")) is None
    shell("python recover.py ref.pt recovered/ref")
    assert difference(saved_ref, recovered("ref.pt")["ref"]) is None


FSDP = """
from torch.distributed.tensor import distribute_tensor
with open_run("runs/ranks") as ckpt:
    state = {**trained(fsdp()["model"]), "rng": async_ckpt.RngState(), "odd": distribute_tensor(
        torch.arange(10).to(torch.complex64), mesh_of(), [Shard(0)])}
    ckpt.save(state, 5).result()
"""


def test_a_step_of_several_ranks_is_recovered_by_hand(here, worlds):
    tool("jq")
    worlds.run(2, f"import async_ckpt\nos.chdir({str(here)!r})\n{FSDP}")
    assert len([*Path("runs/ranks/step_00000005").iterdir()]) == 2 + 3  # as the page says
    shell(BLOCKS["several ranks"])
    write_script("recover.py")
    shell(BLOCKS["rebuild"])
    saved = async_ckpt.load("runs/ranks")
    saved["rng"] = saved["rng"][0]
    assert difference(by_plain_types(saved), recovered("recovered.pt")) is None


# --- the runbook ---------------------------------------------------------------------------------------------------


def test_the_runbook_has_a_section_with_a_command_for_each_alert():
    runbook = PAGE.partition("\n## Runbook\n")[2]
    assert re.findall(r"^### (\w+)$", runbook, flags=re.M) == ALERTS
    assert [title for title in BLOCKS if title in ALERTS] == ALERTS


@pytest.fixture
def run(here: Path) -> Path:
    """A run with four steps, one of which was not committed."""
    with AsyncCheckpointer("runs/a") as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save({"weight": torch.ones(MIB)}, step).result()
    Path("runs/a/step_00000002/manifest.json").unlink()
    return here


@pytest.mark.parametrize(
    ("alert", "status", "shown"),
    [
        ("CheckpointTooOld", 0, r'"step": 4,\s+"age_seconds": \d+'),
        ("CheckpointsFail", 0, r"\n +2 .*not committed"),
        ("CheckpointStallHigh", 0, r"^1\t[\d.e-]+\t[\d.e-]+\n3\t"),
        ("CheckpointBandwidthLow", 0, r"raw write(.|\n)*save until durable"),
        ("StorageSpaceLow", 1, r"1 of 3 steps would be deleted(.|\n)*can be repaired"),  # 1: there is something to mend
    ],
)
def test_the_command_of_an_alert_shows_what_it_is_for(run, alert, status, shown):
    tool("jq")
    assert re.search(shown, shell(BLOCKS[alert], status=status))
