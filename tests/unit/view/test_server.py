"""The server lets nobody in who does not hold the key, and the written page holds no foreign script."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.made_runs import Shape, make_run, make_tokenizer

from llamarl.observe.run_folder import METRICS, TIMINGS
from llamarl.view.data import ViewData
from llamarl.view.export import bundled, inert_json, written_page
from llamarl.view.server import STATIC, ViewServer

Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    data = ViewData([make_run(tmp_path_factory.mktemp("served") / "run", Shape())])
    data.index()
    served = ViewServer(data)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def ask(server: ViewServer, path: str, method: str = "GET", **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    found = reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    connection.close()
    return found


def cookie(server: ViewServer) -> str:
    return f"{server.cookie}={server.key}"


def test_the_key_becomes_a_cookie_and_leaves_the_address(server: ViewServer) -> None:
    status, headers, _ = ask(server, f"/?key={server.key}")
    assert status == 303 and headers["location"] == "/"
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["set-cookie"].split("; "))
    status, headers, body = ask(server, "/", Cookie=cookie(server))
    assert status == 200 and b"<!doctype html>" in body


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/live", "/api/run/0/overview", "/?key=wrong", "/?key="])
def test_without_the_key_nothing_is_given(server: ViewServer, path: str) -> None:
    for header in ({}, {"Cookie": f"{server.cookie}=wrong"}, {"Cookie": "\x00; ;=,"}):
        assert ask(server, path, **header)[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]"])
def test_a_foreign_host_is_refused_even_with_the_key(server: ViewServer, host: str) -> None:
    assert ask(server, "/api/live", Cookie=cookie(server), Host=host)[0] == 421


def test_a_forwarded_port_is_welcome(server: ViewServer) -> None:
    assert ask(server, "/api/live", Cookie=cookie(server), Host="localhost:1234")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_reading_is_possible(server: ViewServer, method: str) -> None:
    assert ask(server, "/api/live", method, Cookie=cookie(server))[0] == 501


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/live", "/api/run/0/group?ordinal=99999", "/nothing"])
def test_every_answer_carries_the_policy_and_none_opens_to_other_sites(server: ViewServer, path: str) -> None:
    _, headers, _ = ask(server, path, Cookie=cookie(server))
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/static/app.js", "/uplot.LICENSE", "/api/", "/api/run/9/overview", "/api/run/0/x", "/%2e%2e/x"],
)
def test_only_known_names_are_served(server: ViewServer, path: str) -> None:
    assert ask(server, path, Cookie=cookie(server))[0] == 404


def test_strange_queries_are_no_errors(server: ViewServer) -> None:
    for query in ("first=x&last=nan&points=1e9", "names=" + "a," * 500, "from=inf&to=-1", "ordinal=1e400", "limit=-5"):
        for name in ("series", "timeline", "rollouts", "groups", "histograms"):
            assert ask(server, f"/api/run/0/{name}?{query}", Cookie=cookie(server))[0] == 200, (name, query)


# The written page

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "\u202e", "\x00", "&lt;", "]]>"]


def test_hostile_text_cannot_leave_its_element(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model", ["<unk>", *HOSTILE])
    run = make_run(
        tmp_path / "run",
        Shape(updates=2),
        model=model,
        texts=lambda ordinal, sample: [1, 2, 3, 4, 5, 6],
        prompt=HOSTILE[0],
    )
    data = ViewData([run])
    data.index()
    page = written_page(data).decode()
    assert "alert(1)" in page and page.count("</script>") == 2, "that of the data and that of the page's own script"
    assert "<script>alert" not in page and "\x00" not in page
    assert "default-src 'none'" in page and "unsafe-inline" not in page
    assert "8 of 8 kept groups are in this page" in page


def test_a_written_page_of_a_large_run_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    data = ViewData([make_run(tmp_path / "run", Shape(updates=100, groups=8))])
    data.index()
    page = written_page(data)
    shown = re.search(rb"run: (\d+) of 800 kept groups are in this page", page)
    assert shown and 50 <= int(shown[1]) <= 61 and len(page) < 8_000_000


def test_a_written_page_has_every_curve(tmp_path: Path) -> None:
    """Its names were cut off after 32, in alphabetical order; charts of those behind them were empty."""
    folder = make_run(tmp_path / "run", Shape(updates=3))
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    more = {f"a_metric_{number}": 0.5 for number in range(40)}
    (folder / METRICS).write_text("".join(json.dumps({**row, **more}) + "\n" for row in rows))
    data = ViewData([folder])
    stored = re.search(r'id="data">(.*?)</script>', written_page(data).decode(), re.DOTALL)
    assert stored
    (run,) = json.loads(stored[1])["runs"]
    assert run["series"]["series"].keys() == {*run["overview"]["metrics"]} >= {"zero_variance_share", *more}


def test_memory_is_the_most_of_all_starts(tmp_path: Path) -> None:
    """Peaks begin anew with every start, and a resumed run may hold less."""
    folder = make_run(tmp_path / "run", Shape(updates=3))
    rows = [json.loads(line) for line in (folder / TIMINGS).read_text().splitlines()]
    peaks = {
        row["update"]: {"trainer_memory_gib": gib}
        for row, gib in zip([r for r in rows if "update" in r], (60.0, 61.0, 40.0), strict=True)
    }
    told = [row | peaks.get(row.get("update"), {}) for row in rows]
    (folder / TIMINGS).write_text("".join(json.dumps(row) + "\n" for row in told))
    data = ViewData([folder])
    data.index()
    assert b"trainer 61.0 GiB" in written_page(data)


def test_json_is_no_markup() -> None:
    assert not set("<>&") & set(inert_json({"a": "</script>&<!--"}))


def test_modules_can_be_joined_into_one_script() -> None:
    """No two of them have a top-level name in common, and nothing is imported from elsewhere."""
    script = bundled("app.js")
    names = re.findall(r"^(?:async function|function|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)) > 50, sorted(name for name in names if names.count(name) > 1)
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    used = {path.name for path in STATIC.glob("*.js")} - {"uplot.js"}
    done: set[str] = set()
    bundled("app.js", done)
    assert done == used


def test_no_code_of_the_page_parses_markup_or_text() -> None:
    for path in STATIC.glob("*.js"):
        if path.name != "uplot.js":
            words = (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "http:",
                "https:",
            )
            assert not [word for word in words if word in path.read_text()], path.name
