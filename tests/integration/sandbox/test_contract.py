"""What every driver promises of commands, terminals and ends, tried on each driver of `CASES`."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from sandbox_drivers import CASES, KUBERNETES, Case
from sandbox_fixtures import on, sh

from openforge.sandbox.contract import Box, Sandbox, SandboxDriver, SandboxLost, Terminal

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("command", "code"), [("true", 0), ("exit 3", 3), ("no-such-program", 127), ("kill -9 $$", -9)]
)
async def test_the_exit_code_says_how_the_command_ended(box: Sandbox, command: str, code: int) -> None:
    assert (await sh(box, command)).exit_code == code


async def test_both_streams_come_back_apart_and_byte_for_byte(box: Sandbox) -> None:
    result = await sh(box, r"printf '\377\000\n'; printf 'err\376' >&2")
    assert (result.stdout, result.stderr) == (b"\xff\x00\n", b"err\xfe")


async def test_cwd_env_and_stdin_are_as_asked(box: Sandbox) -> None:
    result = await box.exec(
        "pwd; echo $COLOUR $HOME; cat", timeout_s=5, cwd="/tmp", env={"COLOUR": "blue"}, stdin=b"from outside"
    )
    assert result.stdout == b"/tmp\nblue /tmp\nfrom outside"


async def test_a_cwd_that_is_not_there_is_said_so(box: Sandbox) -> None:
    result = await box.exec("true", timeout_s=5, cwd="/nowhere")
    assert result.exit_code == 126
    assert b"/nowhere" in result.stderr


async def test_an_argument_vector_is_not_read_by_a_shell(box: Sandbox) -> None:
    result = await box.exec(["printf", "%s|", "a b", "$HOME;ls"], timeout_s=5)
    assert result.stdout == b"a b|$HOME;ls|"


@pytest.mark.parametrize("command", ["echo \0", [], ["a\0b"]])
async def test_a_command_no_kernel_can_start_is_the_callers_result(box: Sandbox, command: str | list[str]) -> None:
    assert (await box.exec(command, timeout_s=5)).exit_code == 126


async def test_text_that_is_no_utf8_reaches_the_command_as_it_was(box: Sandbox) -> None:
    result = await box.exec(["printf", "%s", b"caf\xe9".decode("utf-8", "surrogateescape")], timeout_s=5)
    assert result.stdout == b"caf\xe9"
    assert (await box.exec("echo '\ud800'", timeout_s=5)).exit_code == 0


async def test_a_flood_is_capped_and_its_first_and_last_part_kept(box: Sandbox) -> None:
    result = await sh(box, "echo begin; head -c 30000000 /dev/zero; echo end", output_cap=10_000)
    assert result.truncated
    assert len(result.stdout) == 10_000
    assert result.stdout.startswith(b"begin")
    assert result.stdout.endswith(b"end\n")


async def test_large_input_and_output_pass_at_once(box: Sandbox) -> None:
    data = bytes(range(256)) * 8192
    result = await box.exec("cat", timeout_s=20, stdin=data, output_cap=4 << 20)
    assert result.stdout == data


async def test_a_background_process_does_not_hold_up_its_command(box: Sandbox) -> None:
    began = time.monotonic()
    result = await sh(box, "sleep 30 & echo started")
    assert result.stdout == b"started\n"
    assert time.monotonic() - began < 20
    assert b"sleep" in (await sh(box, "cat /proc/[0-9]*/comm")).stdout


async def test_a_timeout_ends_what_the_command_started_and_nothing_else(box: Sandbox) -> None:
    await sh(box, "sleep 1111 >/dev/null 2>&1 &")
    loud = "trap '' TERM; env -i setsid sh -c 'sleep 2222 & sleep 2222' & sleep 3333"
    beside, result = await asyncio.gather(
        sh(box, "sleep 1; echo unharmed"), sh(box, f"echo partial; {loud}", timeout_s=0.5)
    )
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"partial\n")
    assert beside.stdout == b"unharmed\n"
    left = (await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
    assert b"1111" in left
    assert b"2222" not in left
    assert b"3333" not in left


async def test_a_cancelled_call_takes_its_command_with_it(box: Sandbox) -> None:
    call = asyncio.create_task(sh(box, "sleep 4444"))
    await asyncio.sleep(0.3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.2)
    assert b"4444" not in (await sh(box, "cat /proc/[0-9]*/cmdline")).stdout


async def test_many_commands_run_at_once(box: Sandbox) -> None:
    results = await asyncio.gather(*(sh(box, f"sleep 0.2; echo {n}") for n in range(16)))
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(16)]


async def test_killing_everybody_does_not_end_the_sandbox(box: Sandbox) -> None:
    await sh(box, "kill -9 -1")
    await sh(box, "for s in $(seq 31); do kill -$s 1; done")
    assert (await sh(box, "echo still here")).stdout == b"still here\n"


async def test_orphans_are_reaped(box: Sandbox) -> None:
    await sh(box, "for i in 1 2 3 4 5; do (sleep 0.05 &) ; done; sleep 0.5")
    assert b"Z (zombie)" not in (await sh(box, "grep -h State /proc/[0-9]*/status")).stdout


async def test_kill_all_leaves_files_and_a_working_sandbox(box: Sandbox) -> None:
    await sh(box, "echo kept > file; (setsid sh -c 'while :; do date > clock; sleep 0.01; done' >/dev/null 2>&1 &)")
    await sh(box, "until test -s clock; do sleep 0.01; done")
    await box.kill_all()
    assert (await sh(box, "cat /proc/[0-9]*/comm | sort | uniq -c")).stdout.count(b"\n") <= 5
    before = await box.get("/workspace/clock")
    await asyncio.sleep(0.1)
    assert await box.get("/workspace/clock") == before
    assert await box.get("/workspace/file") == b"kept\n"


async def test_stop_may_be_called_twice_and_ends_everything(driver: SandboxDriver, case: Case) -> None:
    box = await driver.create(case.spec("twice"))
    running = asyncio.create_task(sh(box, "sleep 5555", timeout_s=60))
    await asyncio.sleep(0.3)
    await asyncio.gather(box.stop(), box.stop())
    await box.stop()
    with pytest.raises(SandboxLost):
        await running
    with pytest.raises(SandboxLost):
        await sh(box, "true")


async def test_a_sandbox_ends_when_its_time_is_over(driver: SandboxDriver, case: Case) -> None:
    box = await driver.create(case.spec("short", ttl_s=0.3))
    await asyncio.sleep(1.0)
    with pytest.raises(SandboxLost):
        await sh(box, "true")


# Terminals.


async def said(terminal: Terminal, until: bytes) -> bytes:
    heard = b""
    async with asyncio.timeout(20):
        while until not in heard:
            part = await terminal.read()
            assert part, heard
            heard += part
    return heard


async def all_said(terminal: Terminal) -> bytes:
    heard = b""
    async with asyncio.timeout(20):
        while part := await terminal.read():
            heard += part
    return heard


async def test_a_command_on_a_terminal_is_talked_to_and_its_window_changes(box: Box) -> None:
    talk = "tty; stty size; read line; stty size; echo got $line; exit 7"
    terminal = await box.terminal(["/bin/sh", "-c", talk], rows=40, cols=100, env={"PS1": ""})
    assert b"/dev/pts/" in await said(terminal, b"40 100")
    terminal.resize(50, 120)
    await terminal.write(b"hello\n")
    assert b"50 120" in await said(terminal, b"got hello")
    assert await asyncio.wait_for(terminal.wait(), 20) == 7
    await terminal.close()
    await terminal.close()


async def test_no_byte_on_a_terminal_waits_for_the_next(box: Box) -> None:
    terminal = await box.terminal("stty raw -echo; printf up; exec cat")
    await said(terminal, b"up")
    for number in range(256):
        await terminal.write(bytes([number]))
        assert await asyncio.wait_for(terminal.read(), 20) == bytes([number])
    await terminal.close()


async def test_a_signal_reaches_the_command_on_the_terminal(box: Box) -> None:
    terminal = await box.terminal("echo up; exec sleep 60")
    await said(terminal, b"up")
    await terminal.signal(signal.SIGTERM)
    assert await asyncio.wait_for(terminal.wait(), 20) == -signal.SIGTERM
    assert await all_said(terminal) == b""
    await terminal.close()


async def test_a_closed_terminal_takes_everything_it_started_with_it(box: Box) -> None:
    terminal = await box.terminal("(trap '' HUP; setsid sleep 6161 & sleep 6161) & echo up; sleep 6161")
    await said(terminal, b"up")
    await terminal.close()
    await asyncio.sleep(0.3)
    assert b"6161" not in (await sh(box, "cat /proc/[0-9]*/cmdline")).stdout
    assert (await sh(box, "echo unharmed")).stdout == b"unharmed\n"


async def test_output_that_nobody_reads_stops_the_command_and_is_not_lost(box: Box) -> None:
    terminal = await box.terminal(
        "i=0; while [ $i -lt 60000 ]; do echo line-$i-with-some-length-to-it; i=$((i+1)); done"
    )
    await asyncio.sleep(0.5)
    heard = await all_said(terminal)
    assert heard.count(b"\n") == 60000
    assert await asyncio.wait_for(terminal.wait(), 20) == 0
    await terminal.close()


async def test_a_program_that_is_not_there_says_so_on_the_terminal(box: Box) -> None:
    terminal = await box.terminal(["no-such-program"])
    assert b"no-such-program" in await all_said(terminal)
    assert await terminal.wait() == 127
    await terminal.close()


# Adoption.


async def test_an_adopted_box_is_the_one_that_was_asked_for(driver: SandboxDriver, case: Case) -> None:
    box = await driver.create(case.spec("ready", ttl_s=0.5))
    driver.adopt(box, case.spec("asked-for", env={"COLOUR": "blue"}, ttl_s=60.0, labels={"run": "r"}))
    await asyncio.sleep(0.8)
    assert (await sh(box, "echo $COLOUR")).stdout == b"blue\n"
    await box.stop()
    with pytest.raises(SandboxLost):
        driver.adopt(box, case.spec("again"))


SHOWS_FOLDERS = on(*(case for case in CASES if case is not KUBERNETES))


@SHOWS_FOLDERS
async def test_a_folder_of_the_host_is_shown_read_only_also_in_the_place_of_the_sandboxs_own(
    driver: SandboxDriver, case: Case, tmp_path: Path
) -> None:
    (tmp_path / "shown").mkdir(mode=0o755)
    (tmp_path / "shown/check.sh").write_text("echo shown")
    tmp_path.chmod(0o755)
    for inside in ("/tests", "/opt/shown"):
        box = await driver.create(case.spec("shows", binds={inside: str(tmp_path / "shown")}))
        assert (await sh(box, f"sh {inside}/check.sh")).stdout == b"shown\n"
        assert (await sh(box, f"echo x > {inside}/new; rm {inside}/check.sh")).exit_code != 0
        await box.stop()


# Privacy.


PRY = """
for what in mem environ fd/0 fd/1 maps; do
  (true </proc/$PPID/$what) 2>/dev/null && echo $what
done
true
"""


@pytest.mark.parametrize(
    "command",
    [("/bin/sh", "-c", f"{PRY.strip()}; sh /tmp/pry.sh; echo $0 $SECRET"), ("sh", "/tmp/outer.sh"), ("/tmp/outer.sh",)],
)
async def test_what_a_private_command_starts_cannot_reach_into_it(box: Box, command: tuple[str, ...]) -> None:
    await box.put("/tmp/pry.sh", PRY.encode())
    await box.put("/tmp/outer.sh", b"#!/bin/sh\nsh /tmp/pry.sh\necho $0 $SECRET\n", mode=0o755)
    env = {"SECRET": "swordfish"}
    open_to_all = await box.exec(["/bin/sh", "/tmp/outer.sh"], timeout_s=30, env=env)
    assert b"mem" in open_to_all.stdout or b"environ" in open_to_all.stdout
    private = await box.exec(command, timeout_s=30, env=env, private=True)
    assert private.exit_code == 0
    assert private.stdout.split()[-1] == b"swordfish"
    assert len(private.stdout.splitlines()) == 1, private.stdout
