"""deploy/: the container, compose, systemd and Kubernetes files. Their schemas hold, their commands and probes work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import trustme
import typer
import yaml

from escrowmq.cli.failures import Exit
from escrowmq.cli.main import app
from forked import Forked

DEPLOY = Path(__file__).parent.parent / "deploy"
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()
COMPOSE = DEPLOY / "container" / "compose.yaml"
UNIT = DEPLOY / "systemd" / "escrowmq.service"
HEALTH = DEPLOY / "container" / "health.py"


def instruction(name: str) -> list[str]:
    """The JSON form of the last instruction of this name in the Containerfile."""
    found: list[str] = json.loads(re.findall(rf"^{name} .*?(\[.*\])$", CONTAINERFILE, re.MULTILINE)[-1])
    return found


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def objects() -> dict[str, Any]:
    with (DEPLOY / "kubernetes" / "escrowmq.yaml").open() as file:
        return {one["kind"]: one for one in yaml.safe_load_all(file)}


def broker() -> dict[str, Any]:
    (found,) = objects()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def unit() -> dict[str, str]:
    lines = (line.partition("=") for line in UNIT.read_text().splitlines() if not line.startswith("#"))
    return {name: value for name, equals, value in lines if equals}


COMMANDS = {
    "image": instruction("CMD"),
    "kubernetes": broker()["args"],
    "systemd": unit()["ExecStart"].split()[1:],
    **{name: service["command"] for name, service in services().items() if service.get("image") == "escrowmq"},
}


@pytest.mark.parametrize("where", COMMANDS)
def test_every_command_exists_with_its_options(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCROWMQ_DATABASE_URL", "sqlite://")
    command, words = typer.main.get_command(app), list(COMMANDS[where])
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    assert command.make_context("escrowmq", words).params


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Start one of the commands with folder, addresses and files of the test's own, and return what it announces."""
    started: list[Any] = []

    def run(words: list[str], *more: str) -> dict[str, Any]:
        text = " ".join(words).replace("/data/", f"{tmp_path}/").replace("/etc/escrowmq", str(tmp_path))
        own = re.sub(r"(0\.0\.0\.0|127\.0\.0\.1):\d+", "127.0.0.1:0", text.replace("/var/lib/escrowmq", str(tmp_path)))
        process = Forked(
            [sys.executable, "-m", "escrowmq", *own.split(), "--json", *more], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return dict(json.loads(process.stdout.readline()))

    yield run
    for process in started:
        process.terminate()
        process.communicate()
        assert process.returncode == 0


def health(url: str) -> subprocess.CompletedProcess[str]:
    python, script = instruction("HEALTHCHECK")
    assert (python, Path(script).name) == ("python", HEALTH.name)
    assert services()["broker"]["healthcheck"]["test"] == ["CMD", python, script]
    environment = {**os.environ, "HEALTH_URL": url}
    while True:  # whoever runs it asks again, too, when there was no answer in its four seconds
        done = subprocess.run([sys.executable, HEALTH], env=environment, capture_output=True, text=True)
        if "timed out" not in done.stderr:
            return done


@pytest.mark.verify
@pytest.mark.parametrize("where", ["image", "systemd", "broker"])
def test_the_health_check_sees_a_broker_and_its_end(where: str, start: Callable[..., dict[str, Any]]) -> None:
    ready = start(COMMANDS[where])
    assert ready["folder"].endswith("/broker")
    found = health(f"{ready['metrics']}/healthz")
    assert (found.returncode, json.loads(found.stdout)["status"]) == (0, "ok")
    gone = health("http://127.0.0.1:1/healthz")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "127.0.0.1:1" in gone.stderr
    assert health(f"{ready['metrics']}/nothing").returncode == 1


@pytest.mark.verify
def test_the_image_by_itself_is_refused_beyond_loopback(tmp_path: Path) -> None:
    """Nobody serves a network without TLS and rights by accident."""
    words = [word.replace("/data", str(tmp_path)) for word in instruction("CMD")]
    done = subprocess.run([sys.executable, "-m", *instruction("ENTRYPOINT"), *words], capture_output=True, text=True)
    assert done.returncode == Exit.DENIED
    assert "--tls-cert" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.verify
def test_the_pod_s_broker_has_tls_rights_and_probes(start: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "rights").mkdir()
    served = trustme.CA().issue_cert("127.0.0.1")
    served.private_key_pem.write_to_path(tmp_path / "tls" / "tls.key")
    for pem in served.cert_chain_pems:
        pem.write_to_path(tmp_path / "tls" / "tls.crt", append=True)
    command = [sys.executable, "-m", "escrowmq", "rights", "init", "rights/rights.toml", "--tokens", "tokens"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    ready = start(broker()["args"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = broker()[probe]["httpGet"]
        assert (asked["scheme"], asked["port"]) == ("HTTPS", "metrics")
        assert health(ready["metrics"] + asked["path"]).returncode == 0


def test_the_files_keep_to_their_schemas() -> None:
    for one in objects().values():
        kubernetes_validate.validate(one, "1.34", strict=True)
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_kubernetes_objects_belong_together() -> None:
    found = objects()
    assert found.keys() == {"Service", "PodDisruptionBudget", "StatefulSet"}
    template = found["StatefulSet"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    for kind in ("PodDisruptionBudget", "StatefulSet"):
        assert found[kind]["spec"]["selector"]["matchLabels"] == labels
    assert found["StatefulSet"]["spec"]["serviceName"] == found["Service"]["metadata"]["name"]
    claims = [one["metadata"]["name"] for one in found["StatefulSet"]["spec"]["volumeClaimTemplates"]]
    volumes = {*claims, *(one["name"] for one in template["spec"]["volumes"])}
    assert {mount["name"] for mount in broker()["volumeMounts"]} == volumes
    ports = {f"0.0.0.0:{port['containerPort']}" for port in broker()["ports"]}
    assert ports == {word.partition("=")[2] for word in broker()["args"] if "0.0.0.0" in word}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} == {p["name"] for p in broker()["ports"]}
    user = str(template["spec"]["securityContext"]["runAsUser"])
    assert f"USER {user}:{user}" in CONTAINERFILE
    assert broker()["securityContext"]["readOnlyRootFilesystem"]


def test_the_kubernetes_files_memory_and_volume_hold_what_the_page_says() -> None:
    """By docs/production.md: its bytes for each transaction, twice the body of 1 KB, a third of the disk free."""
    page = (DEPLOY.parent / "docs" / "production.md").read_text()
    (per_row,) = re.findall(r"^\| transaction of one message \| \d+ bytes \| (\d+) bytes \|$", page, re.MULTILINE)
    rate, days = re.findall(r"^\| (\d+) \| (\d+) days .*GiB \|$", page, re.MULTILINE)[0]
    rows = int(rate) * 86_400 * int(days)
    gib = 1.1 + rows * int(per_row) / (1 << 30), rows * 2 * 1024 * 1.5 / (1 << 30)
    resources = broker()["resources"]
    (claim,) = objects()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert gib[0] <= int(resources["requests"]["memory"].removesuffix("Gi")) < float(resources["limits"]["memory"][:-2])
    assert gib[1] <= int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))


def test_what_compose_mounts_and_prometheus_reads_exists() -> None:
    for service in services().values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE.parent / source).exists(), volume
    assert (COMPOSE.parent / services()["broker"]["build"]["context"] / "pyproject.toml").exists()
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    serving = {f"{name}:7701" for name, one in services().items() if "0.0.0.0:7701" in one.get("command", ())}
    assert set(job["static_configs"][0]["targets"]) == serving == {"broker:7701", "relay:7701"}
    provider = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "escrowmq.yaml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    mounted = {two: one for one, two, *_ in (volume.split(":") for volume in services()["grafana"]["volumes"])}
    assert (COMPOSE.parent / mounted[folder] / "escrowmq.json").exists()


def test_published_ports_are_for_this_machine_and_no_password_is_written_down() -> None:
    for service in services().values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    text = COMPOSE.read_text()
    assert re.findall(r"PASSWORD: (?!\$\{\w+:\?)", text) == []
    assert not re.search(r"^(FROM|.*image:) \S*\.\w+/", text + CONTAINERFILE, re.MULTILINE), "short names only"


def installed(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{program} is not installed (Debian: {package})")
    return str(found)


def test_prometheus_reads_its_file() -> None:
    command = [installed("promtool", "prometheus"), "check", "config", DEPLOY / "prometheus" / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_reads_its_unit_and_finds_it_closed(tmp_path: Path) -> None:
    analyze = installed("systemd-analyze", "systemd")
    program = Path(sys.executable).with_name("escrowmq")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(unit()["ExecStart"].split()[0], str(program)))
    done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    command = [analyze, "security", "--no-pager", "--offline=true", "--threshold=20", copy]  # 2.0 of 10
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:]
    assert unit()["Type"] == "notify"
