"""The chart in deploy/helm: what Helm makes of it is valid, and trains a job as plain processes."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grpo import deployments, train

from phaseloom import client
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES, ops_stream
from phaseloom.common.transport import natsserver
from phaseloom.router.shell import SOURCE
from tests.support import helm
from tests.support.containers import (
    ROOT,
    completed,
    image_command,
    image_environment,
    last_words,
    listening,
    restarted,
    services,
)
from tests.support.jobs import Reports, no_barrier, oracle, short
from tests.support.processes import free_port

pytestmark = [pytest.mark.long, pytest.mark.skipif(helm.binary() is None, reason="needs helm")]

Manifest = dict[str, Any]
TASK = "chain_sum"
OLDEST, NEWEST = "1.29", "1.37"
"""Versions of Kubernetes."""
CUSTOM = {"ScaledObject"}
"""Kinds that Kubernetes itself does not have."""
MACHINE = "machine-0.example.com"
SMALL = {
    "rollout": {"devices": [8 * 2**20], "hostMemoryBytes": 2**31, "deviceKind": "emulated"},
    "train": {"devices": [16 * 2**20], "hostMemoryBytes": 2**31, "deviceKind": "emulated"},
}
"""Nodes that fit on any machine."""


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod of each Deployment and DaemonSet, by name."""
    owners = of_kind(manifests, "Deployment") | of_kind(manifests, "DaemonSet")
    return {name: owner["spec"]["template"] for name, owner in owners.items()}


def containers_of(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def secret(manifests: list[Manifest]) -> dict[str, str]:
    values: dict[str, str] = of_kind(manifests, "Secret")["phaseloom-auth"]["stringData"]
    return values


def chart_values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    return values


# --- what is rendered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tenants": ["a", "B_2"], "console": {"enabled": True}, "telemetry": {"otlpEndpoint": "x"}},
        {"router": {"autoscaling": {"mode": "hpa"}}, "image": {"pullSecrets": ["mine"]}},
        {"router": {"autoscaling": {"mode": "keda"}}, "drain": {"timeoutSeconds": 0}},
        {
            "gateway": {"enabled": False},
            "nats": {"enabled": False},
            "bus": {"url": "nats://elsewhere:4222"},
            "global": {"authSecret": "mine"},
            "checkpoints": {"existingClaim": "shared"},
            "networkPolicy": {"clients": [{"podSelector": {}}]},
        },
        {"nodePools": {"train": {"hostNetwork": True, "runtimeClassName": "nvidia"}}},
        {"nats": {"config": {"cluster": {"enabled": True}}}},
    ],
    ids=["defaults", "console", "hpa", "keda", "of-others", "host-network", "three-servers"],
)
def test_manifests_are_valid_for_kubernetes(tmp_path: Path, values: dict[str, Any]) -> None:
    manifests = helm.render(tmp_path, values)
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    for manifest in manifests:
        for version in (OLDEST, NEWEST):
            if manifest["kind"] not in CUSTOM:
                kubernetes_validate.validate(manifest, version, strict=True)
    for name, pod in pods(manifests).items():
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        owner = next(m for m in manifests if m.get("spec", {}).get("template") is pod)
        assert owner["spec"]["selector"]["matchLabels"].items() <= labels.items(), name
        mounts = {m["name"] for c in containers_of(pod) for m in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}, name
        # Else a Service's name would become settings of ours.
        assert spec["enableServiceLinks"] is False, name


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tenant": ["a"]}, "additional properties 'tenant' not allowed"),
        ({"tenants": ["a.b"]}, "/tenants/0"),
        ({"nodePools": {"train": {"devices": []}}}, "/nodePools/train/devices"),
        ({"router": {"autoscaling": {"mode": "cpu"}}}, "/router/autoscaling/mode"),
        ({"nats": {"config": {"cluster": {"replicas": 2}}}}, "/nats/config/cluster/replicas"),
        ({"bus": {"url": "nats://elsewhere:4222", "replicas": 2}}, "/bus/replicas"),
        ({"scheduler": {"replica": 3}}, "additional properties 'replica' not allowed"),
        ({"gateway": {"service": {"type": "None"}}}, "/gateway/service/type"),
    ],
)
def test_wrong_value_is_refused_by_its_name(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    refused = helm.template(tmp_path, values)
    assert refused.returncode != 0
    assert said in refused.stderr


def test_services_know_all_of_three_servers_and_that_they_replicate(tmp_path: Path) -> None:
    manifests = helm.render(tmp_path, {"nats": {"config": {"cluster": {"enabled": True}}}})
    pod = "nats://phaseloom-nats-{}.phaseloom-nats-headless:4222"
    for name, each in pods(manifests).items():
        said = {e["name"]: e.get("value") for e in each["spec"]["containers"][0]["env"]}
        assert said["PHASELOOM_BUS_URL"] == ",".join(pod.format(n) for n in range(3)), name
        assert said["PHASELOOM_BUS_REPLICAS"] == "3", name
        is_node = name.startswith("phaseloom-node")
        assert said.get("PHASELOOM_WORKER_LEASE_TTL_S") == ("12" if is_node else None), name


def test_settings_are_those_that_services_have(tmp_path: Path) -> None:
    """A variable that no service reads ends it; here each is a field of that service's settings."""
    known = {
        match
        for service in ("scheduler", "router", "gateway", "worker", "statemgr")
        for match in _variables(ROOT / f"services/{service}/phaseloom/{service}", service)
    }
    used = {
        variable["name"]
        for pod in pods(helm.render(tmp_path, {})).values()
        for container in containers_of(pod)
        for variable in container.get("env", [])
    }
    shared = {"PHASELOOM_LOG_FORMAT", "PHASELOOM_METRICS_PORT"}
    shared |= {f"PHASELOOM_BUS_{name}" for name in ("URL", "USER", "PASSWORD", "REPLICAS")}
    ours = {name for name in used if name.startswith("PHASELOOM_")} - shared
    assert ours
    assert ours <= known


def _variables(package: Path, service: str) -> set[str]:
    sources = "\n".join(path.read_text() for path in package.glob("*.py"))
    sources += (ROOT / "libs/common/phaseloom/common/contract/specs.py").read_text()
    return {
        f"PHASELOOM_{service}_{field}".upper()
        for field in re.findall(r"^    ([a-z_]+): ", sources, re.MULTILINE)
    }


def test_images_are_those_that_are_built_here(tmp_path: Path) -> None:
    manifests = helm.render(tmp_path, {"image": {"registry": "r.example.com", "tag": "7"}})
    for pod in pods(manifests).values():
        for container in containers_of(pod):
            match = re.fullmatch(r"r\.example\.com/phaseloom-(\w+):7", container["image"])
            assert match, container["image"]
            assert match[1] in services()


def test_accounts_are_those_of_the_embedded_server(tmp_path: Path) -> None:
    values = secret(helm.render(tmp_path, {"tenants": ["a", "b"]}))
    accounts = json.loads(values["accounts.conf"].removeprefix("accounts: "))
    passwords = {tenant: values[f"password-{tenant}"] for tenant in ("a", "b")}
    assert accounts == natsserver.accounts(values["mesh-password"], passwords)
    assert json.loads(values["gateway-passwords"]) == passwords
    keys = {f"tml-{password}": tenant for tenant, password in passwords.items()}
    assert json.loads(values["gateway-keys"]) == keys
    secrets = [values["mesh-password"], values["state-secret"], *passwords.values()]
    assert len(set(secrets)) == len(secrets)
    assert min(len(word) for word in secrets) >= 32


def test_server_fsyncs_and_takes_what_the_embedded_one_takes() -> None:
    config = chart_values()["nats"]["config"]
    assert config["jetstream"]["merge"] == natsserver.SYNCED
    assert config["merge"]["max_payload"] == MAX_PAYLOAD_BYTES


def test_routers_are_scaled_by_the_operations_that_wait_for_them(tmp_path: Path) -> None:
    values = {"tenants": ["a", "b"], "router": {"autoscaling": {"mode": "keda"}}}
    manifests = helm.render(tmp_path, values)
    assert "replicas" not in of_kind(manifests, "Deployment")["phaseloom-router"]["spec"]
    spec = of_kind(manifests, "ScaledObject")["phaseloom-router"]["spec"]
    triggers = [trigger["metadata"] for trigger in spec["triggers"]]
    assert [trigger["stream"] for trigger in triggers] == [ops_stream("a"), ops_stream("b")]
    for trigger in triggers:
        assert (trigger["account"], trigger["consumer"]) == ("MESH", SOURCE)


def test_only_the_maker_of_certificates_has_the_key_of_the_authority(tmp_path: Path) -> None:
    have = {
        (name, container["name"])
        for name, pod in pods(helm.render(tmp_path, {})).items()
        for container in containers_of(pod)
        if "authority" in {mount["name"] for mount in container["volumeMounts"]}
    }
    assert have == {(f"phaseloom-node-{pool}", "certificates") for pool in ("rollout", "train")}


def test_state_manager_starts_before_the_agent_and_ends_after_it(tmp_path: Path) -> None:
    """As a sidecar does. It has time for the drain: the agent's hook, then both ends."""
    manifests = helm.render(tmp_path, {"drain": {"timeoutSeconds": 100}})
    for pool in ("rollout", "train"):
        spec = pods(manifests)[f"phaseloom-node-{pool}"]["spec"]
        manager = spec["initContainers"][-1]
        assert (manager["name"], manager["restartPolicy"]) == ("state-manager", "Always")
        assert "startupProbe" in manager
        assert spec["terminationGracePeriodSeconds"] > 100


# --- what is rendered, as plain processes ---------------------------------------------------------


class Pods:
    """Where things of a pod are on this machine, whose node is `MACHINE`."""

    def __init__(self, directory: Path, manifests: list[Manifest], secrets: dict[str, str]) -> None:
        self._directory = directory
        self._secrets = secrets
        self._pods = pods(manifests)

    def command(self, pod: str, container: Manifest) -> list[str]:
        """What is run, with the paths of this machine."""
        command = container.get("command")
        if command is None:
            # This Python may be in a directory of the machine that is also a path of a mount.
            return image_command(_service(container))
        mounts = self._mounts(pod, container)
        return [_within(part, mounts) for part in command]

    def environment(self, pod: str, container: Manifest) -> dict[str, str]:
        mounts = self._mounts(pod, container)
        values = image_environment()
        for variable in container.get("env", []):
            values[variable["name"]] = self._value(pod, variable)
        for name, value in values.items():
            referred = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], value)
            values[name] = _within(referred, mounts)
        # All pods are on one machine here, and have one address.
        values |= {"PHASELOOM_METRICS_PORT": "0", "PHASELOOM_METRICS_HOST": "127.0.0.1"}
        path = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        return values | {"PATH": ":".join(path)}

    def _value(self, pod: str, variable: Manifest) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable["value"])
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == "phaseloom-auth"
            return self._secrets[source["secretKeyRef"]["key"]]
        fields = {"spec.nodeName": f"{pod}.{MACHINE}", "status.podIP": "127.0.0.1"}
        return {**fields, "metadata.name": f"{pod}-0"}[source["fieldRef"]["fieldPath"]]

    def _mounts(self, pod: str, container: Manifest) -> dict[str, str]:
        """Path inside → path on this machine, of the volumes of a pod."""
        volumes = {volume["name"]: volume for volume in self._pods[pod]["spec"]["volumes"]}
        found = {}
        for mount in container["volumeMounts"]:
            # Names are short, for the paths of sockets.
            place = self._directory / pod.removeprefix("phaseloom-") / mount["name"]
            if mount["name"] == "checkpoints":
                place = self._directory / "checkpoints"
            place /= mount.get("subPath", "")
            place.mkdir(parents=True, exist_ok=True)
            for item in volumes[mount["name"]].get("secret", {}).get("items", []):
                (place / item["path"]).write_text(self._secrets[item["key"]])
            found[mount["mountPath"]] = str(place)
        return found


def _within(text: str, mounts: Mapping[str, str]) -> str:
    paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{paths})(?![\w-])", lambda found: mounts[found[0]], text)


def _service(container: Manifest) -> str:
    image: str = container["image"]
    return image.partition(":")[0].removeprefix("phaseloom-")


@asynccontextmanager
async def server(directory: Path, port: int, secrets: dict[str, str]) -> AsyncIterator[None]:
    """A nats-server with the settings that the chart gives to NATS's own chart."""
    config = chart_values()["nats"]["config"]
    merged = dict(config["merge"])
    included = (directory / "conf" / merged.pop("00$include")).resolve()
    included.parent.mkdir()
    included.write_text(secrets["accounts.conf"])
    store = {"store_dir": str(directory / "js"), **config["jetstream"]["merge"]}
    settings = {"host": "127.0.0.1", "port": port, "jetstream": store, **merged}
    file = directory / "conf" / "nats.conf"
    file.parent.mkdir()
    lines = [f"{name}: {json.dumps(value)}" for name, value in settings.items()]
    file.write_text("\n".join([*lines, 'include "../nats-auth/accounts.conf"']))
    command: list[str | Path] = [natsserver.find_binary(), "--config", file]
    async with listening(port, directory / "nats.log", command, {}):
        yield


@asynccontextmanager
async def running(
    directory: Path, manifests: list[Manifest], nats_port: int
) -> AsyncIterator[Pods]:
    """One pod of each kind, its containers in their order."""
    secrets = secret(manifests)
    here = Pods(directory, manifests, secrets)
    tasks: list[asyncio.Task[None]] = []
    async with server(directory, nats_port, secrets):
        try:
            for name, pod in pods(manifests).items():
                for container in containers_of(pod):
                    if container["name"] == "disk":  # it needs root, for a directory of the machine
                        continue
                    log = directory / f"{name}-{container['name']}.log"
                    command = here.command(name, container)
                    environment = here.environment(name, container)
                    is_service = container in pod["spec"]["containers"]
                    if is_service or container.get("restartPolicy") == "Always":
                        tasks.append(asyncio.create_task(restarted(log, command, environment)))
                    else:
                        await completed(log, command, environment)
            yield here
        except Exception as error:
            error.add_note(last_words(directory))
            raise
        finally:
            for task in reversed(tasks):
                task.cancel()
                await asyncio.wait([task])


async def test_job_trains_on_what_the_chart_starts_and_a_node_is_drained(
    tmp_path: Path, short_dir: Path
) -> None:
    port, gateway_port = free_port(), free_port()
    values = {
        "bus": {"url": f"nats://127.0.0.1:{port}"},
        "gateway": {"port": gateway_port},
        "nodePools": SMALL,
        "drain": {"timeoutSeconds": 60},
    }
    manifests = helm.render(tmp_path / "chart", values)
    settings = short(TASK, steps=1)
    reports = Reports()
    node = "phaseloom-node-train"
    async with running(short_dir, manifests, port) as here:
        password = secret(manifests)["password-demo"]
        async with client.connect(f"nats://127.0.0.1:{port}", "demo", password) as mesh:
            job = await mesh.submit_job(TASK, deployments(settings))
            await train(job, TASK, settings, reports, no_barrier)
            await job.finish()
            # The node's pod ends, and the next one begins.
            spec = pods(manifests)[node]["spec"]
            (agent,) = spec["containers"]
            (undo,) = (c for c in spec["initContainers"] if c["name"] == "undo-drain")
            hook = {**agent, "command": agent["lifecycle"]["preStop"]["exec"]["command"]}
            log, marker = short_dir / "drain.log", short_dir / "node-train/state/.pod/drained"
            await completed(log, here.command(node, hook), here.environment(node, hook))
            assert marker.is_file()
            await completed(log, here.command(node, undo), here.environment(node, undo))
            assert not marker.exists()
    assert "empty; it may be shut down" in log.read_text()
    assert "no longer draining" in log.read_text()
    alone = await asyncio.to_thread(oracle, TASK, settings, tmp_path)
    assert reports.weights_sha256 == alone
