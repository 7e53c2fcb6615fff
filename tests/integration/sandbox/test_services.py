"""Services of a task come up in the box before anybody needs them, or it is said why not."""

import pytest
from needed import needs
from process_watch import until_gone
from sandbox_drivers import Case

from openforge.sandbox.contract import Box, SandboxDriver
from openforge.sandbox.services import Health, Service, ServiceFailed, Services

pytestmark = pytest.mark.asyncio(loop_scope="module")
NEEDS_PYTHON = needs("/usr/bin/python3")

WEB = Service(
    name="web",
    command=("/bin/sh", "-c", "sleep 0.5; exec /usr/bin/python3 -m http.server $PORT --bind 127.0.0.1"),
    env={"PORT": "8900"},
    health=Health(port=8900, path="/ready.txt", timeout_s=30.0),
)


@NEEDS_PYTHON
async def test_a_service_that_answers_its_check_is_there_for_the_next_command(box: Box) -> None:
    await box.put("/workspace/ready.txt", b"ready")
    services = Services(box, longest_s=60.0)
    await services.start([WEB, Service(name="file", command=("sh", "-c", "echo $$ > pid; exec sleep 7171"))])
    ask = "exec 3<>/dev/tcp/127.0.0.1/8900; printf 'GET /ready.txt HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    assert (await box.exec(["/bin/bash", "-c", ask], timeout_s=10)).stdout.endswith(b"ready")
    await services.stop()
    await services.stop()
    await until_gone("sleep\0007171")


@pytest.mark.parametrize(
    ("service", "why"),
    [
        (Service(name="dies", command=("sh", "-c", "echo no disk >&2; exit 4"), health=Health(port=9)), "no disk"),
        (
            Service(
                name="ill",
                command=("sleep", "7272"),
                health=Health(command=("sh", "-c", "echo ill; false"), timeout_s=3.0),
            ),
            "ill",
        ),
        (Service(name="absent", command=("no-such-server",), health=Health(command=("false",))), "no-such-server"),
    ],
)
async def test_a_service_that_does_not_come_up_is_named_with_its_last_words(
    box: Box, service: Service, why: str
) -> None:
    with pytest.raises(ServiceFailed, match=f"service {service.name}: .*{why}"):
        await Services(box, longest_s=60.0).start([service])
    await until_gone("sleep\0007272")


async def test_a_lost_box_fails_its_services(driver: SandboxDriver, case: Case) -> None:
    box = await driver.create(case.spec("lost"))
    await box.stop()
    with pytest.raises(ServiceFailed):
        await Services(box, longest_s=60.0).start([Service(name="late", command=("sleep", "1"), health=Health(port=1))])
