"""The report of a recorded run: figures, the page in a real browser, the tables, the line at the end."""

from __future__ import annotations

import collections
import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
import torch

from sdpa_router import Code, cli, cost_files
from sdpa_router.costs import Point, Size, Table
from sdpa_router.report_page import mask_picture, page
from sdpa_router.run_file import read_run
from sdpa_router.run_writer import summary
from sdpa_router.tune import recorded_shapes

SCRIPT = """
import torch, torch.nn.functional as F, sdpa_router
x = torch.randn(1, 2, 8, 16)
with sdpa_router.route():
    for _ in range(3):
        F.scaled_dot_product_attention(x, x, x)
    sdpa_router.reset_stats()
    F.scaled_dot_product_attention(x, x, x, torch.zeros(8, 8))
    F.scaled_dot_product_attention(x, x, x, is_causal=True)
    F.scaled_dot_product_attention(x, x, x, is_causal=True)
"""


def recorded(path, script=SCRIPT, **variables):
    environment = {**os.environ, "SDPA_ROUTER_JSONL": str(path), **variables}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )


def event(number, query, key, *, backend="int8", reasons=(), mask="none", pid=1, **more):
    """A first sight as record.py writes it."""
    tensor = {"strides": [1, 1, 1, 1], "dtype": "bfloat16", "device": "cuda:0"}
    mask_of = {"kind": mask} if mask == "none" else {"kind": mask, "shape": [1, 1, 1, key[2]], "dtype": "bool"}
    signature = {"query": {"shape": query, **tensor}, "key": {"shape": key, **tensor}, "is_causal": False}
    return {
        "event": "first",
        "time": 0.0,
        "pid": pid,
        "phase": "eager",
        "number": number,
        "backend": backend,
        "reasons": list(reasons),
        "notes": [],
        "detail": f"{backend} because <b>{reasons}</b>",
        "signature": signature,
        "mask": mask_of,
        "caller": "/a/very/long/path/" + "deeply/" * 30 + "attention_processor_with_a_long_name.py:1234 __call__",
        **more,
    }


def totals(counts, pid=1, devices=("a GPU",)):
    return {"event": "totals", "pid": pid, "devices": list(devices), "counts": counts}


LONG, SHORT, MASKED = [1, 24, 8192, 128], [1, 24, 512, 128], [1, 24, 4096, 128]


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A run on a GPU whose costs are known: int8, a short call, a full mask, a peer."""
    times = {
        (8192, "none"): (2.0, 3.0),
        (512, "none"): (0.3, 0.1),
        (4096, "full"): (None, 2.0),
        (4096, "key"): (0.5, 1),
    }
    points = []
    for (length, mask), (int8, torch_) in times.items():
        ms = {"torch": torch_} if int8 is None else {"torch": torch_, "int8": int8}
        points.append(Point(Size(1, 24, length, length, 128, mask), ms))
    monkeypatch.setattr("sdpa_router.run_file.shipped_table", lambda name: Table(tuple(points)))
    lines = [
        event(0, LONG, LONG),
        event(1, SHORT, SHORT, backend="sdpa", reasons=["short"]),
        event(2, MASKED, MASKED, backend="sdpa", reasons=["full_mask"], mask="full"),
        event(3, MASKED, MASKED, backend="comfy", reasons=["slower"], mask="per_key", estimates={"comfy": 0.4}),
        event(4, LONG, LONG, pid=2),
        event(0, LONG, LONG, pid=2),
        {"event": "counts", "pid": 1, "counts": {"1": 90}},
        totals({"0": 60, "1": 10, "2": 30, "3": 50}),
        totals({"0": 40, "4": 20}, pid=2),
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_figures_of_a_run(run_file):
    run = read_run(run_file)
    assert [row.count for row in run.rows] == [120, 100, 30, 50], "calls alike are one row, also of other processes"
    assert run.complete
    assert run.calls == 300
    assert run.routed_calls == 170
    assert run.by_time
    total = 120 * 2.0 + 100 * 0.1 + 30 * 2.0 + 50 * 0.4
    assert run.routed_share == pytest.approx((120 * 2.0 + 50 * 0.4) / total)
    assert sum(map(run.weight, run.rows)) == pytest.approx(1)
    assert [(item.code, item.calls) for item in run.advice()] == [("full_mask", 30), ("short", 100)]
    assert run.advice()[1].cure == Code.SHORT.cure
    assert run.advice()[0].saved_ms == 0


def test_advice_says_what_could_be_saved(run_file):
    lines = [event(0, LONG, LONG, backend="sdpa", reasons=["requires_grad", "news"]), totals({"0": 10})]
    run_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_run(run_file).advice()
    assert {first.code, second.code} == {"requires_grad", "news"}
    assert first.saved_ms == pytest.approx(10 * 1.0)
    assert "another version" in {first.code: first.cure, second.code: second.cure}["news"]
    assert "could save" in page(read_run(run_file))


def test_without_costs_shares_are_of_operations(run_file, monkeypatch):
    monkeypatch.setattr("sdpa_router.run_file.shipped_table", lambda name: None)
    run = read_run(run_file)
    assert not run.by_time
    operations = {row.backend: row.operations for row in run.rows}
    assert run.weight(run.rows[0]) == pytest.approx(operations["int8"] / sum(row.operations for row in run.rows))
    assert "of attention operations routed" in page(run)


def test_a_process_that_was_killed_is_told(run_file):
    lines = run_file.read_text().splitlines()
    run_file.write_text("\n".join(line for line in lines if '"totals"' not in line))
    run = read_run(run_file)
    assert not run.complete
    assert [row.count for row in run.rows] == [3, 90, 1, 1]
    assert "without writing its counts" in page(run)


def test_a_run_that_is_cut_short_anywhere_is_read_up_to_there(run_file):
    whole = run_file.read_bytes()
    lines = whole.splitlines(keepends=True)
    first = len(lines[0])
    for cut in (*range(first, first + 40), len(whole) - 20, len(whole) - 2):
        run_file.write_bytes(whole[:cut])
        run = read_run(run_file)
        assert 1 <= len(run.rows) <= 4
        assert not run.complete
    run_file.write_bytes(whole.rstrip())
    assert read_run(run_file).complete


def test_a_line_that_was_cut_is_skipped_with_one_warning(run_file):
    lines = run_file.read_bytes().splitlines(keepends=True)
    whole = read_run(run_file)
    run_file.write_bytes(b"".join([lines[0], lines[1][:50], b"\n", *lines[1:]]))
    with pytest.warns(UserWarning, match=r"line 2 of .*run.jsonl is no record of a call: .*; it is skipped$") as caught:
        assert read_run(run_file).rows == whole.rows
    assert len(caught) == 1
    run_file.write_bytes(b"".join([lines[0], b"\0\0\n", b"[" * 10**5 + b"\n", lines[1][:50], b"\xc3\n", *lines[2:]]))
    with pytest.warns(UserWarning, match=r"line 2 of .*; it is skipped and so are 2 more$") as caught:
        assert [row.count for row in read_run(run_file).rows] == [120, 30, 50]
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="line 2"):
        assert len(recorded_shapes(run_file)) == 3
    command = [sys.executable, "-m", "sdpa_router", "report", str(run_file), "--text"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    assert re.fullmatch(r"sdpa-router: line 2 of [^\n]*skipped and so are 2 more\n", told)


def test_whoever_appends_after_a_line_that_was_cut_begins_a_new_one(tmp_path):
    path = tmp_path / "run.jsonl"
    recorded(path)
    path.write_bytes(path.read_bytes()[:-20])
    recorded(path)
    path.write_bytes(path.read_bytes()[:-1])
    recorded(path)
    with pytest.warns(UserWarning, match=r"line \d+ of .*; it is skipped$"):
        run = read_run(path)
    assert not run.complete, "one process' totals were cut"
    assert [row.count for row in run.rows] == [9, 3, 5]


def test_processes_with_one_pid_are_told_apart(run_file):
    """Those of containers, which all have pids of their own."""
    lines = []
    for began, count in ((1.5, 10), (2.5, 200)):
        lines += [event(0, LONG, LONG, began=began), {**totals({"0": count}), "began": began}]
    run_file.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], lines[2], lines[1], lines[3])))
    assert [row.count for row in read_run(run_file).rows] == [210]
    run_file.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    assert not read_run(run_file).complete


def test_this_machines_costs_are_taken_where_the_gpu_is_the_same(run_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    size = Size(1, 24, 8192, 8192, 128)
    monkeypatch.setattr("sdpa_router.run_file.table_for", lambda device: Table((Point(size, {"int8": 7.0}),)))
    assert read_run(run_file).rows[0].ms == {"int8": pytest.approx(7.0)}


def test_a_real_run(tmp_path):
    path = tmp_path / "run.jsonl"
    recorded(path, TRITON_INTERPRET="0")
    run = read_run(path)
    assert run.complete
    assert [row.count for row in run.rows] == [3, 1, 2], "what reset_stats() forgets was called all the same"
    assert {row.backend for row in run.rows} == {"torch"}
    assert "is_causal" in page(run)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "{",
        "[]",
        "{}",
        '{"event": "first"}',
        '{"event": "totals"}',
        "\x00",
        "\x80",
        "[" * 10**5,
        '{"event":"first"',
    ],
)
def test_files_that_are_no_record_are_refused(tmp_path, capsys, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text, encoding="latin-1")
    for arguments in (["report", str(path), "--text"], ["report", str(path), "-o", str(tmp_path / "out.html")]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


VALUES = (
    None,
    True,
    -1,
    5,
    1e299,
    1e400,
    float("nan"),
    10**400,
    "<script>",
    "\x1b[2J\udce9\u202e",
    [],
    {},
    [None],
    {"a": None},
)


def _places(value, place=()):
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _places(inner, (*place, name))


def _exit_code(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code


def _with(value, place, new):
    if not place:
        return new
    copied = copy.copy(value)
    copied[place[0]] = _with(value[place[0]], place[1:], new)
    return copied


@pytest.mark.parametrize("which", [0, 1])
def test_whatever_a_line_holds_it_is_shown_escaped_or_refused(tmp_path, capsys, which):
    shape = [1, 2, 64, 64]
    lines = [event(0, shape, shape, reasons=["short"], estimates={"int8": 1.0, "torch": 2.0}), totals({"0": 3})]
    path, out = tmp_path / "run.jsonl", tmp_path / "out.html"
    outcomes = collections.Counter()
    for place, value in itertools.product(_places(lines[which]), VALUES):
        changed = [_with(line, place, value) if line is lines[which] else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        code, told = _exit_code(["report", str(path), "--text", "-o", str(out)]), capsys.readouterr()
        if code:
            outcomes["refused"] += 1
            assert code == 2
            assert "is no record of a call" in told.err or "holds no call" in told.err, (place, value)
            continue
        outcomes["shown"] += 1
        assert "<script" not in out.read_text(encoding="utf-8"), (place, value)
        for text in (told.out, out.read_text(encoding="utf-8")):
            assert not {"\x1b", "\u202e"} & {*text}, (place, value)
            assert not re.search(r"\b(nan|inf)\b", text), (place, value)
    assert min(outcomes["refused"], outcomes["shown"]) > 5


def test_a_page_over_its_own_run_is_refused(run_file, capsys):
    before = run_file.read_text()
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(run_file), "-o", str(run_file)])
    assert stop.value.code == 2
    assert "accepted: another file" in capsys.readouterr().err
    assert run_file.read_text() == before


def test_many_kinds_of_calls_take_no_square_of_time(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [event(number, [1, 2, 64 + number, 64], [1, 2, 64, 64]) for number in range(4000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = time.perf_counter()
    assert page(read_run(path)).count("<tr>") == 501, "the heaviest, below a head"
    assert time.perf_counter() - began < 20, "0.7 s where nobody else computes; with a sum for each row minutes"


def test_bad_arguments_are_refused(run_file, capsys):
    for arguments in (["report", str(run_file)], ["report", "nowhere.jsonl", "--text"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
        assert "accepted" in capsys.readouterr().err


def test_a_stdout_of_few_characters_shows_others_as_question_marks(run_file):
    run_file.write_text(json.dumps(event(0, LONG, LONG, backend="größe")) + "\n")
    command = [sys.executable, "-m", "sdpa_router", "report", str(run_file), "--text"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert b"gr??e" in subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120).stdout


def test_a_file_that_can_not_be_read_is_no_trouble_with_writing(run_file, capsys, monkeypatch):
    for name in (str(run_file), "a" * 5000 + ".jsonl", str(run_file.parent)):
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        for arguments in (["report", name, "--text"], ["tune", "--shapes", name]):
            with pytest.raises(SystemExit) as stop:
                cli.main(arguments)
            assert stop.value.code == 2
            assert "accepted: a file that exists and can be read" in capsys.readouterr().err


def test_the_tables(run_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal breaks words
    assert cli.main(["report", str(run_file), "--text"]) == 0
    text = capsys.readouterr().out
    for word in ("300 calls, 170 routed", "time (estimated) routed", "1x24x8192x128", "full_mask", "comfy", "2.00"):
        assert word in text
    assert Code.SHORT.cure in text


class _Tags(HTMLParser):
    """Checks that tags are balanced and collects what could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        assert tag != "script"
        if tag not in ("meta", "br", "rect", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag


def test_the_page_is_whole_escaped_and_loads_nothing(run_file):
    text = page(read_run(run_file))
    tags = _Tags()
    tags.feed(text)
    assert (tags.open, tags.loads) == ([], [])
    assert "<b>[" not in text
    assert "&lt;b&gt;" in text
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize("kind", ["none", "per_key", "full", "invalid"])
def test_every_kind_of_mask_has_a_picture(run_file, kind):
    run_file.write_text(json.dumps(event(0, LONG, LONG, mask=kind)) + "\n")
    (row,) = read_run(run_file).rows
    cells = mask_picture(row).count('class="cell"')
    assert {"none": cells == 96, "per_key": 50 < cells < 96, "full": 0 < cells < 96, "invalid": cells == 0}[kind]


def test_of_thousands_of_kinds_the_heaviest_are_shown(run_file, capsys):
    lengths = [8192, *range(1, 3000)]
    keys = [[1, 24, length, 128] for length in lengths]
    lines = [event(number, LONG, shape, backend="sdpa", reasons=["short"]) for number, shape in enumerate(keys)]
    run_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target = run_file.with_suffix(".html")
    assert cli.main(["report", str(run_file), "-o", str(target), "--text"]) == 0
    text, made = capsys.readouterr().out, target.read_text()
    assert target.stat().st_size < 6e6
    assert len(text.splitlines()) < 230
    for shown, kinds in ((text, "2,800"), (made, "2,500")):
        assert f"and {kinds} lighter kinds of calls: {kinds} calls, " in shown
    assert "1x24x8192x128  1x24x8192x128" in text
    assert f"<b>{3000:,}</b>attention calls" in made


# --- in a browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as started:
        try:
            made = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except api.Error as error:
            pytest.skip(f"no Chromium can be started here: {str(error).splitlines()[0]}")
        yield made
        made.close()


OVERFLOWING = """() => {
    const wide = document.documentElement.clientWidth;
    const out = [...document.querySelectorAll('body *')].filter(element => {
        const box = element.getBoundingClientRect();
        return box.width > 0 && (box.right > wide + 1 || box.left < -1);
    });
    const cut = [...document.querySelectorAll('td, .tile, code, p')].filter(e => e.scrollWidth > e.clientWidth + 1 &&
        getComputedStyle(e).display !== 'inline');
    return [...out, ...cut].map(element => element.tagName + ' ' + element.className + ' ' + element.textContent);
}"""


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(browser, run_file, tmp_path, width, scheme):
    target = tmp_path / "report.html"
    assert cli.main(["report", str(run_file), "-o", str(target)]) == 0
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, problems = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: problems.append(message.text))
    tab.goto(target.as_uri())
    text = tab.inner_text("body")
    for word in ("Attention calls of run.jsonl", "300", "170", "To route more", "full_mask", "comfy", "8192"):
        assert word in text
    assert re.search(r"of attention time routed", text)
    assert tab.evaluate(OVERFLOWING) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.click("summary >> nth=0")
    assert "because" in tab.inner_text("details >> nth=0")
    assert tab.evaluate(OVERFLOWING) == []
    folder = os.environ.get("SDPA_ROUTER_SCREENSHOTS", str(tmp_path))
    picture = tab.screenshot(path=os.path.join(folder, f"report-{width}-{scheme}.png"), full_page=True)
    assert _colours(picture) > 20, "something is drawn"
    assert asked == [target.as_uri()]
    assert problems == []
    tab.close()


def _colours(picture):
    import io

    from PIL import Image

    return len(Image.open(io.BytesIO(picture)).convert("RGB").getcolors(2**24))


# --- the line at the end


def test_one_line_at_the_end_where_it_is_asked_for(tmp_path):
    done = recorded(tmp_path / "run.jsonl", SDPA_ROUTER_LOG="info", TRITON_INTERPRET="0")
    (line,) = done.stderr.splitlines()
    assert line.startswith("sdpa_router: 3 attention calls, 0 routed (0 %): torch 3; reasons: device 3, dtype 3")
    assert recorded(tmp_path / "run.jsonl").stderr == ""
    nothing = recorded(tmp_path / "run.jsonl", "import sdpa_router", SDPA_ROUTER_LOG="info")
    assert nothing.stderr.startswith("sdpa_router: no attention call came by")
    unknown = recorded(tmp_path / "run.jsonl", SDPA_ROUTER_LOG="debug")
    assert unknown.stderr == "sdpa_router: SDPA_ROUTER_LOG=debug means nothing; accepted: info\n"
    workers = """
import multiprocessing, torch, torch.nn.functional as F, sdpa_router
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(len, ([],))
        pool.close()
        pool.join()
    with sdpa_router.route():
        F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 4, 4))
"""
    path = tmp_path / "workers.py"
    path.write_text(workers)
    started = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    (line,) = recorded(tmp_path / "run.jsonl", started, SDPA_ROUTER_LOG="info").stderr.splitlines()
    assert "1 attention calls" in line


def test_the_line_counts_everyone():
    line = summary(
        {"calls": 8, "routes": {"int8": 5, "sdpa": 2, "fa3": 1}, "reasons": {"short": 1, "mask": 2, "a": 1, "b": 1}}
    )
    assert line == (
        "sdpa_router: 8 attention calls, 6 routed (75 %): int8 5, fa3 1, torch 2; reasons: mask 2, short 1, a 1"
    )


def test_costs_of_a_recorded_gpu_are_the_shipped_ones():
    assert cost_files.shipped_table("no such GPU") is None
