"""What holds of sandboxes that are pods, beyond the contract: the official client against a server for tests."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import pytest_asyncio
from kube_api import NAMESPACE, KubeApi, Refusal
from sandbox_drivers import KUBERNETES, kubernetes_driver

from openforge.sandbox.contract import Box, CannotIsolate, SandboxLost
from openforge.sandbox.kubernetes import KubernetesDriver
from openforge.sandbox.kubernetes.pod import ANNOTATION, PodSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
spec = KUBERNETES.spec


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tmp_path_factory: pytest.TempPathFactory, no_cluster: None) -> AsyncIterator[Any]:
    made = await kubernetes_driver(tmp_path_factory.mktemp("state"), None, None)
    yield made
    await made.close()


@pytest.fixture(scope="module")
def no_cluster() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("KUBECONFIG", raising=False)
        yield


@pytest.fixture
def api(driver: Any) -> KubeApi:
    made: KubeApi = driver.api
    return made


async def echo(box: Box, text: str) -> bytes:
    return (await box.exec(["echo", text], timeout_s=30)).stdout


async def lost(box: Box) -> str:
    async with asyncio.timeout(20):
        while box.alive:  # until the watch has told
            await asyncio.sleep(0.05)
    with pytest.raises(SandboxLost) as told:
        await asyncio.wait_for(box.exec("sleep 30", timeout_s=60), 20)
    return str(told.value)


async def test_a_pod_holds_no_token_no_environment_and_no_right(driver: KubernetesDriver, api: KubeApi) -> None:
    box = await driver.create(spec("pod", env={"KEY": "swordfish"}, labels={"run": "a run"}))
    pod = api.pods[box.id]
    assert (await box.exec("echo $KEY", timeout_s=30)).stdout == b"swordfish\n"
    assert "swordfish" not in json.dumps(pod)
    assert json.loads(pod["metadata"]["annotations"][ANNOTATION]) == {"run": "a run"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1000m", "memory": "192Mi"}
    assert pod["spec"]["volumes"][1]["emptyDir"]["medium"] == "Memory"
    await box.stop()
    assert box.id not in api.pods


async def test_policies_let_nothing_in_and_only_the_proxy_out(api: KubeApi, tmp_path: Path) -> None:
    settings = PodSettings(toolbox="toolbox:1", proxy="10.9.8.7:8080", proxy_labels={"app": "proxy"})
    kubeconfig = str(api.kubeconfig(tmp_path / "k"))
    other = await KubernetesDriver(settings, owner="proxied", namespace=NAMESPACE, kubeconfig=kubeconfig).start()
    closed, to_proxy = (api.policies[f"openforge-proxied-{network}"]["spec"] for network in ("none", "proxy-only"))
    assert (closed["ingress"], closed["egress"]) == ([], [])
    assert to_proxy["ingress"] == []
    assert to_proxy["egress"][0]["to"] == [{"podSelector": {"matchLabels": {"app": "proxy"}}, "namespaceSelector": {}}]
    assert to_proxy["egress"][0]["ports"] == [{"protocol": "TCP", "port": 8080}]
    await other.close()


async def test_folders_of_a_harness_come_from_images_of_their_own_or_the_sandboxs(api: KubeApi, tmp_path: Path) -> None:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "agent").write_text("echo at work")
    api.image_volumes["harness:1"] = tmp_path / "harness"
    tools = {"/opt/harness": "harness:1", "/usr": ""}
    settings = PodSettings(toolbox="toolbox:1", tools=tools)
    kubeconfig = str(api.kubeconfig(tmp_path / "k"))
    other = await KubernetesDriver(settings, owner="tooled", namespace=NAMESPACE, kubeconfig=kubeconfig).start()
    box = await other.create(spec("tooled", binds={"/opt/harness": "/srv/harness", "/usr": "/usr"}))
    kubernetes_validate.validate(api.pods[box.id] | {"apiVersion": "v1", "kind": "Pod"}, "1.37", strict=True)
    assert (await box.exec("sh /opt/harness/agent", timeout_s=30)).stdout == b"at work\n"
    assert (await box.exec("touch /opt/harness/x", timeout_s=30)).exit_code != 0
    await other.close()


async def test_a_server_that_is_busy_or_broken_for_a_while_is_asked_again(
    driver: KubernetesDriver, api: KubeApi
) -> None:
    api.refuse += [
        Refusal(429, "TooManyRequests", "later", retry_after=1),
        Refusal(500, "InternalError", "etcd"),
        Refusal(503, "ServiceUnavailable", "away"),
    ]
    box = await driver.create(spec("busy"))
    assert await echo(box, "here") == b"here\n"
    assert not api.refuse
    await box.stop()


async def test_a_create_whose_answer_was_lost_makes_one_pod(driver: KubernetesDriver, api: KubeApi) -> None:
    api.lose_answers = 1
    box = await driver.create(spec("lost-answer"))
    assert [name for name in api.pods if "lost-answer" in name] == [box.id]
    await box.stop()


async def test_watches_that_expire_or_break_miss_nothing(driver: KubernetesDriver, api: KubeApi) -> None:
    for expire in (True, False):
        api.break_watches(expire=expire)
        box = await driver.create(spec("watched"))
        api.break_watches(expire=expire)
        api.end_pod(box.id, reason="Evicted")
        assert "Evicted" in await lost(box)
        assert not box.alive
        await box.stop()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"reason": "Evicted"}, "Evicted The node was low on resource"),
        ({"container_reason": "OOMKilled"}, r"OOMKilled \(exit code 137\)"),
        ({"reason": "DeadlineExceeded"}, "DeadlineExceeded"),
    ],
)
async def test_a_pod_that_ended_is_lost_by_the_clusters_own_cause(
    driver: KubernetesDriver, api: KubeApi, how: dict[str, str], named: str
) -> None:
    box = await driver.create(spec("ends"))
    running = asyncio.create_task(box.exec("sleep 30", timeout_s=60))
    await asyncio.sleep(0.5)
    api.end_pod(box.id, **how)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 20)
    assert re.search(named, await lost(box))
    await box.stop()


async def test_an_image_that_is_not_there_is_said_so_at_once(driver: KubernetesDriver, api: KubeApi) -> None:
    with pytest.raises(SandboxLost, match="ImagePullBackOff"):
        await asyncio.wait_for(driver.create(spec("none", image="absent:1")), 20)
    await asyncio.sleep(0.5)
    assert not [name for name in api.pods if "sandbox-none" in name]


async def test_a_pod_without_a_node_waits_and_then_says_why(
    driver: KubernetesDriver, api: KubeApi, tmp_path: Path
) -> None:
    kubeconfig = str(api.kubeconfig(tmp_path / "k"))
    settings = PodSettings(toolbox="toolbox:1")
    hasty = KubernetesDriver(settings, owner="hasty", namespace=NAMESPACE, kubeconfig=kubeconfig, start_s=1.5)
    await hasty.start()
    api.unschedulable = True
    try:
        with pytest.raises(SandboxLost, match="Unschedulable"):
            await hasty.create(spec("no-node"))
    finally:
        api.unschedulable = False
        await hasty.close()
    assert not [name for name in api.pods if "no-node" in name]


async def test_what_an_earlier_life_of_this_owner_left_is_ended_and_nothing_else(
    driver: KubernetesDriver, api: KubeApi, tmp_path: Path
) -> None:
    kubeconfig = str(api.kubeconfig(tmp_path / "k"))

    async def life(owner: str) -> KubernetesDriver:
        settings = PodSettings(toolbox="toolbox:1")
        return await KubernetesDriver(settings, owner=owner, namespace=NAMESPACE, kubeconfig=kubeconfig).start()

    first, second, stranger = await life("twice"), await life("twice"), await life("stranger")
    left = await first.create(spec("left", labels={"run": "r"}))
    mine = await second.create(spec("mine", labels={"run": "r"}))
    theirs = await stranger.create(spec("theirs", labels={"run": "r"}))
    assert await second.reconcile({"run": "another"}) == 0
    assert await second.reconcile({"run": "r"}) == 1
    assert left.id not in api.pods
    assert await echo(mine, "unharmed") == await echo(theirs, "unharmed") == b"unharmed\n"
    api.refuse += [Refusal(403, "Forbidden", "not now")]
    with pytest.raises(SandboxLost, match="none was ended: not now"):
        await second.reconcile({})
    for owner in (first, second, stranger):
        await owner.close()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"image": ""}, "OPENFORGE_SANDBOX_IMAGE"),
        ({"network": "open"}, "network = 'open'"),
        ({"binds": {"/data": "/srv"}}, "binds"),
    ],
)
async def test_what_a_pod_cannot_be_is_refused_by_name(
    driver: KubernetesDriver, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        await driver.create(spec("wrong", **wrong))


async def test_no_cluster_and_no_rights_are_said_at_the_start(api: KubeApi, tmp_path: Path) -> None:
    with pytest.raises(CannotIsolate, match="KUBECONFIG"):
        KubernetesDriver(PodSettings(toolbox="t"), owner="x", kubeconfig=str(tmp_path / "absent"))
    kubeconfig = str(api.kubeconfig(tmp_path / "k"))
    elsewhere = KubernetesDriver(PodSettings(toolbox="t"), owner="x", namespace="kube-system", kubeconfig=kubeconfig)
    with pytest.raises(CannotIsolate, match="namespace kube-system"):
        await elsewhere.start()
    await elsewhere.close()
