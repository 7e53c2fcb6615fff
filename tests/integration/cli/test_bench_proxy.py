"""`openforge bench proxy` says what its readers expect, from a proxy at work."""

import asyncio
from pathlib import Path

import msgspec

from openforge.cli.bench._proxy_peers import PEERS
from openforge.cli.bench._proxy_text import FIRST_TOKENS, GROWTH_TOKENS, TURNS, Conversation, model_folder, tokenizer_of
from openforge.cli.bench.proxy import Options, Row, bench, report


def test_conversations_grow_from_six_to_ten_thousand_tokens_and_share_no_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(model_folder(tmp_path / "model"))
    conversation, other = Conversation("a"), Conversation("b")
    lengths = []
    for _ in range(TURNS):
        said = [message["content"] for message in conversation.messages]
        lengths.append(sum(len(tokenizer.encode(text).ids) for text in said))
        conversation.goes_on(" ".join(other.messages[0]["content"].split()[: GROWTH_TOKENS // 2]))
    assert FIRST_TOKENS <= lengths[0] < FIRST_TOKENS + 50
    assert FIRST_TOKENS + 9 * GROWTH_TOKENS <= lengths[-1] < 11_500
    assert not {message["content"] for message in conversation.messages[:2]} & {m["content"] for m in other.messages}


async def test_a_short_bench_measures_our_proxy_and_says_why_there_are_no_peers() -> None:
    told = await asyncio.wait_for(bench(Options(calls=20, repeats=1, memory_calls=170)), 600)
    for field in (
        "added_ms_p50_c1",
        "cold_ms_p50",
        "calls_per_s_c16",
        "floor_calls_per_s_c16",
        "stored_bytes_per_turn",
    ):
        assert told[field] > 0, field
    assert told["best_peer_calls_per_s_c16"] is None
    assert told["rss_growth_mb_10k_calls"] is None, "170 calls are not ten thousand"
    assert told["memory"]["calls"] == 320, (
        "whole episodes of all that are at work at once, and not fewer calls than asked"
    )
    assert len(told["memory"]["rss_mb"]) == 3
    rows = msgspec.convert(msgspec.to_builtins(told["rows"]), list[Row])
    own = [(row.name, row.processes) for row in rows[:4]]
    assert own == [("openforge", 1), ("openforge, streamed", 1), ("openforge, 2 processes", 2), ("floor", 2)]
    assert [row.name for row in rows[4:]] == [peer.title for peer in PEERS]
    assert all("--peers" in row.reason for row in rows[4:])


def test_the_best_peer_is_the_one_with_the_most_calls() -> None:
    figures = dict.fromkeys(("added_ms_p50_c1", "added_ms_p99_c1", "cold_ms_p50", "cpu_ms_c16"), 1.0)
    one = Row(name="openforge", figures=figures | {"calls_per_s_c16": 9.0})
    two = Row(name="openforge, 2 processes", figures=figures | {"calls_per_s_c16": 12.0}, processes=2)
    floor = Row(name="floor", figures=figures | {"calls_per_s_c16": 20.0}, processes=2)
    own = {"rows": [one, two], "floor": floor, "rss_mb": [100.0, 101.5]}
    others = [Row(name=str(rate), figures=figures | {"calls_per_s_c16": rate}) for rate in (2.0, 3.0, 1.0)]
    told = report(own | {"stored_bytes_per_turn": 1.0, "memory_calls": 10_080}, others, Options())
    assert told["best_peer_calls_per_s_c16"] == 3.0
    assert (told["calls_per_s_c16"], told["calls_per_s_c16_many"], told["many"]) == (9.0, 12.0, 2)
    assert told["rss_growth_mb_10k_calls"] == 1.5
