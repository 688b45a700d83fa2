"""Draws the two diagrams of the documentation as SVG files: python docs/figures.py"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, FAINT, SHARED = "#1c2330", "#5c6675", "#1f6fb4"
CLIENTS = {"hospital A": "#e07b00", "hospital B": "#2e8b57", "hospital C": "#b5479b"}
PERSONAL = {1, 4}  # which of the six hidden elements are personal
FONT = "font-family='system-ui, sans-serif'"


def text(x: float, y: float, words: str, *, size: int = 15, fill: str = INK, anchor: str = "middle") -> str:
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' {FONT}>{words}</text>"


def arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> str:
    ends = "marker-end='url(#tip)'" + (" marker-start='url(#tip)'" if both else "")
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{FAINT}' stroke-width='2' {ends}/>"


def box(x: float, y: float, width: float, height: float, fill: str = "#ffffff", stroke: str = "#c8cfda") -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='10' fill='{fill}' stroke='{stroke}'/>"


def picture(name: str, width: int, height: int, label: str, parts: list[str]) -> None:
    tip = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' markerHeight='6' "
        "orient='auto-start-reverse'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{FAINT}'/></marker></defs>"
    )
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'><title>{label}</title>"
    body = "\n".join([head, tip, box(0.5, 0.5, width - 1, height - 1, "#fbfcfe"), *parts, "</svg>", ""])
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_text(body)


def network(x: float, y: float, colour: str) -> list[str]:
    """Inputs, six hidden elements and outputs of one client."""
    hidden = [(x, y + 26 * j) for j in range(6)]
    ends = [(x - 62, y + 65 + 30 * k) for k in (-1, 0, 1)] + [(x + 62, y + 65 + 30 * k) for k in (-0.5, 0.5)]
    lines = [
        f"<line x1='{a}' y1='{b}' x2='{c}' y2='{d}' stroke='{colour if j in PERSONAL else SHARED}' opacity='.22'/>"
        for j, (a, b) in enumerate(hidden)
        for c, d in ends
    ]
    dots = [
        f"<circle cx='{a}' cy='{b}' r='10' fill='{colour if j in PERSONAL else SHARED}'/>"
        for j, (a, b) in enumerate(hidden)
    ]
    return [*lines, *(f"<circle cx='{a}' cy='{b}' r='7' fill='{SHARED}' opacity='.55'/>" for a, b in ends), *dots]


def idea() -> None:
    parts = [box(250, 18, 400, 62), text(450, 43, "server: averages the shared elements", size=16)]
    parts.append(text(450, 66, "needs nothing but sums over clients", size=13, fill=FAINT))
    for i, (name, colour) in enumerate(CLIENTS.items()):
        x = 150 + 300 * i
        parts += [box(x - 120, 130, 240, 245), text(x, 158, name), *network(x, 185, colour)]
        parts.append(text(x, 362, "its data stay here", size=13, fill=FAINT))
        parts.append(arrow(x, 128, 350 + 100 * i, 82, both=True))
    parts.append(f"<circle cx='170' cy='403' r='9' fill='{SHARED}'/>")
    parts.append(text(186, 408, "shared: common factors explain it", size=14, anchor="start"))
    for i, colour in enumerate(CLIENTS.values()):
        parts.append(f"<circle cx='{500 + 22 * i}' cy='403' r='9' fill='{colour}'/>")
    parts.append(text(562, 408, "personal: stays with its client", size=14, anchor="start"))
    label = "Three clients with the same network: most hidden elements are shared through a server, some stay personal"
    picture("idea.svg", 900, 430, label, parts)


def one_round() -> None:
    steps = [
        ("1  compose and train", "shared from the server,", "personal ones from home"),
        ("2  measure", "n, Σz and Σzzᵀ of the", "weights of each split layer"),
        ("4  send what is shared", "n·W of shared elements only;", "the others are not sent"),
        ("5  keep", "own values of every", "element of the split layers"),
    ]
    parts = [text(22, 34, "server", size=15, fill=FAINT, anchor="start")]
    parts.append(text(22, 238, "clients", size=15, fill=FAINT, anchor="start"))
    for i, (head, one, two) in enumerate(steps):
        x = 30 + 215 * i
        parts += [box(x, 250, 195, 92), text(x + 97, 276, head, size=15)]
        parts += [text(x + 97, 302, one, size=12, fill=FAINT), text(x + 97, 320, two, size=12, fill=FAINT)]
    decide = [
        ("3  decide", "R from the sums, factors, ν;", "shared where ν ≥ τ", 245),
        ("6  average", "Σ nW / Σ n of the", "shared elements", 460),
    ]
    for head, one, two, x in decide:
        parts += [box(x, 46, 195, 92), text(x + 97, 72, head, size=15)]
        parts += [text(x + 97, 98, one, size=12, fill=FAINT), text(x + 97, 116, two, size=12, fill=FAINT)]
    parts.append("<line x1='20' x2='880' y1='194' y2='194' stroke='#c2185b' stroke-dasharray='7 5'/>")
    parts.append(text(878, 186, "only sums are needed beyond this line", size=14, fill="#c2185b", anchor="end"))
    parts += [
        arrow(225, 296, 243, 296),
        arrow(342, 248, 342, 142),
        arrow(400, 140, 500, 246),
        arrow(557, 248, 557, 142),
    ]
    parts += [arrow(655, 296, 673, 296)]
    parts.append(text(470, 166, "mask", size=12, fill=FAINT))
    label = "One round of dynamic FedFac: clients train, measure, and send shared parts; the server sees sums only"
    picture("round.svg", 900, 362, label, parts)


if __name__ == "__main__":
    idea()
    one_round()
