"""One self-contained page about a recorded run: no script, no network, pictures as inline SVG."""

from __future__ import annotations

from html import escape

from .run_file import Advice, Row, RunFile

_MOST_ROWS = 500  # of 8 KB each

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --line: #d5dae0; --fill: #eef1f4;
  --routed: #1a7f5a; --native: #9aa4b0; --warn: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9ba5b0; --paper: #14181c; --line: #343b43;
  --fill: #20262c; --routed: #4cc38a; --native: #5d6772; --warn: #e0a040; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); } .warn { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--fill); border-radius: 8px; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
svg { display: block; } .bar { width: 100%; height: 14px; border-radius: 7px; }
.routed { fill: var(--routed); } .native { fill: var(--native); }
.cell { fill: var(--ink); } .frame { fill: none; stroke: var(--line); }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .8rem; }
th, td { padding: .45rem .6rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
code { font: .86em ui-monospace, monospace; } .who { font-weight: 600; } .who.yes { color: var(--routed); }
.times { display: grid; grid-template-columns: minmax(4.5rem, auto) auto; gap: 0 .6rem; justify-content: start;
  font-variant-numeric: tabular-nums; font-size: .85rem; } .times .best { font-weight: 600; }
@media (min-width: 821px) { .who-column { width: 22%; } .ms-column { width: 11rem; } .mask-column { width: 5.5rem; } }
details summary { cursor: pointer; color: var(--soft); font-size: .85rem; }
ul { margin: .3rem 0; padding-left: 1.1rem; }
@media (max-width: 820px) { thead { display: none; } table, tbody, tr, td { display: block; width: 100%; }
  tr { border-bottom: 1px solid var(--line); padding: .6rem 0; } td { border: 0; padding: .15rem 0; }
  td.n, th.n { text-align: left; } td[data-name]::before { content: attr(data-name) ": "; color: var(--soft); } }
"""


def page(run: RunFile) -> str:
    """Return the page."""
    title = f"Attention calls of {escape(run.path.name)}"
    body = [f"<h1>{title}</h1>", _intro(run), _tiles(run), _bar(run), _advice(run), _rows(run)]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        )
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(value: float) -> str:
    return f"{value / 1e3:.1f} s" if value >= 1e4 else f"{value:.3g} ms"


def _intro(run: RunFile) -> str:
    where = f"Recorded on {escape(', '.join(run.devices))}." if run.devices else "No GPU was used in this run."
    times = (
        "Times are estimates from measured costs (<code>sdpa-router tune</code>)."
        if any(row.ms for row in run.rows)
        else "No costs are known for this device, so shares are of operations."
    )
    lines = [f'<p class="soft">{where} {times}</p>']
    if not run.complete:
        note = "A process ended without writing its counts: its calls count once a kind."
        lines.append(f'<p class="warn">{note}</p>')
    return "\n".join(lines)


def _tiles(run: RunFile) -> str:
    kind = "time" if run.by_time else "operations"
    total = sum(row.total_ms or 0.0 for row in run.rows)
    tiles = [
        (f"{run.calls:,}", "attention calls"),
        (f"{run.routed_calls:,}", "routed"),
        (_percent(run.routed_share), f"of attention {kind} routed"),
        (str(len(run.rows)), "kinds of calls"),
    ]
    if run.by_time:
        tiles.append((_ms(total), "in attention (estimated)"))
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{b}</b>{text}</div>' for b, text in tiles) + "</div>"


def _bar(run: RunFile) -> str:
    share = 100 * run.routed_share
    label = f"{_percent(run.routed_share)} routed, the rest answered by torch"
    return (
        f'<svg class="bar" viewBox="0 0 100 4" preserveAspectRatio="none" role="img"><title>{label}</title>'
        f'<rect class="native" width="100" height="4"/><rect class="routed" width="{share:.2f}" height="4"/></svg>'
    )


def _advice(run: RunFile) -> str:
    advice = run.advice()
    if not advice:
        return "<h2>To route more</h2><p>Nothing: no call went to torch for a reason.</p>"
    saved = any(item.saved_ms > 0 for item in advice)
    head = '<th>reason</th><th class="n">calls</th><th class="n">share</th>'
    head += ('<th class="n">could save</th>' if saved else "") + "<th>what to change</th>"
    rows = "".join(_advice_row(item, saved) for item in advice)
    return f"<h2>To route more</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _advice_row(item: Advice, saved: bool) -> str:
    cells = [
        f"<td><code>{escape(item.code)}</code></td>",
        f'<td class="n" data-name="calls">{item.calls:,}</td>',
        f'<td class="n" data-name="share">{_percent(item.weight)}</td>',
    ]
    if saved:
        text = _ms(item.saved_ms) if item.saved_ms > 0 else "-"
        cells.append(f'<td class="n" data-name="could save">{text}</td>')
    return f"<tr>{''.join(cells)}<td>{_code_marked(item.cure)}</td></tr>"


def _code_marked(text: str) -> str:
    """Turn `words` between backticks into code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _rows(run: RunFile) -> str:
    rows, others = run.heaviest(_MOST_ROWS)
    head = '<th class="n">calls</th><th class="n">share</th><th class="mask-column">mask</th><th>call</th>'
    head += '<th class="who-column">answered by</th><th class="ms-column">milliseconds a call</th>'
    body = "".join(_row(run, row) for row in rows)
    more = f'<p class="soft">{others}</p>' if others else ""
    return f"<h2>Calls</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _row(run: RunFile, row: Row) -> str:
    record = row.record
    return (
        f'<tr><td class="n" data-name="calls">{row.count:,}</td>'
        f'<td class="n" data-name="share">{_percent(run.weight(row))}</td>'
        f"<td>{mask_picture(row)}</td><td>{_signature(row)}"
        f'<p class="soft"><code>{escape(record["caller"])}</code></p></td>'
        f"<td>{_answer(row)}</td><td>{_times(row)}</td></tr>"
    )


def _signature(row: Row) -> str:
    signature, mask = row.record["signature"], row.record["mask"]
    query, key = signature["query"], signature["key"]
    shapes = (str(tensor.get("shape", tensor.get("type", "?"))) for tensor in (query, key))
    text = " with keys ".join(f"<code>{escape(shape)}</code>" for shape in shapes)
    more = [escape(str(query.get("dtype", "")))]
    if "dtype" in mask:
        more.append(f"mask <code>{escape(str(mask.get('shape')))}</code> {escape(str(mask['dtype']))}")
    more += [name for name in ("is_causal", "enable_gqa") if signature.get(name) is True]
    if row.record["phase"] != "eager":
        more.append(f"counted as {escape(str(row.record['phase']))}s")
    return f"{text}<br>{', '.join(filter(None, more))}"


def _answer(row: Row) -> str:
    mark = "who yes" if row.routed else "who"
    codes = [*row.reasons, *row.record["notes"]]
    lines = [f'<span class="{mark}">{escape(row.backend)}</span>']
    if codes:
        items = "".join(f"<li><code>{escape(code)}</code></li>" for code in codes)
        why = f"<p>{escape(row.record['detail'])}</p>"
        lines.append(f"<ul>{items}</ul><details><summary>in words</summary>{why}</details>")
    return "".join(lines)


def _times(row: Row) -> str:
    if not row.ms:
        return '<span class="soft">not known</span>'
    best = min(row.ms, key=lambda name: row.ms[name])
    cells = []
    for name, ms in sorted(row.ms.items(), key=lambda item: item[1]):
        mark = ' class="best"' if name == best else ""
        cells.append(f"<span{mark}>{escape(name)}</span><span{mark}>{ms:.3g}</span>")
    return f'<div class="times">{"".join(cells)}</div>'


_COLUMNS, _LINES, _CELL = 12, 8, 5
# What a picture shows of each kind; values are not recorded, so it is the kind that is drawn.
_MASK_TEXT = {
    "none": "no mask",
    "causal": "causal",
    "per_key": "one row for all queries",
    "full": "a row for each query",
    "invalid": "not a mask that was judged",
}


def mask_picture(row: Row) -> str:
    """Return a small drawing of the kind of mask: queries down, keys across, dark where they attend."""
    mask = row.record["mask"]
    causal = row.record["signature"].get("is_causal") is True and mask["kind"] == "none"
    kind = "causal" if causal else mask["kind"]
    soft = mask.get("dtype") not in (None, "bool")
    cells = []
    for line in range(_LINES):
        for column in range(_COLUMNS):
            opacity = _opacity(kind, line, column, soft)
            if opacity:
                place = f'x="{column * _CELL}" y="{line * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}"'
                cells.append(f'<rect class="cell" {place} opacity="{opacity:.2f}"/>')
    width, height = _COLUMNS * _CELL, _LINES * _CELL
    text = _MASK_TEXT.get(kind, kind)
    return (
        f'<svg width="{width}" height="{height}" role="img"><title>{escape(text)}</title>{"".join(cells)}'
        f'<rect class="frame" x="-.5" y="-.5" width="{width}" height="{height}"/></svg>'
        f'<span class="soft">{escape(str(kind).replace("_", " "))}</span>'
    )


def _opacity(kind: str, line: int, column: int, soft: bool) -> float:
    if kind == "invalid":
        return 0.0
    if kind == "causal":
        return 0.75 if column * _LINES <= line * _COLUMNS else 0.0
    if kind == "per_key":
        kept = 1.0 if column < 7 else (_COLUMNS - column) / 6 if soft else float(column == 10)
        return 0.75 * kept
    if kind == "full":
        near = abs(column * _LINES / _COLUMNS - line) / 4
        return 0.75 * (max(0.1, 1 - near) if soft else float(near < 0.6))
    return 0.75
