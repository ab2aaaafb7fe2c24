"""What a million images cost, from the rows of `embed_throughput`.

    python -m reproduction.benchmarks.embed_cost --rows results/scale/embed_throughput.json --price 3

The price of an hour is yours to give: it is the only number here that was not measured. The last
column is the cost at the rate of the network alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ltm.files import write_text
from reproduction.benchmarks.recording import parser, table


def cost(row: dict[str, Any], price: float) -> dict[str, Any]:
    """Minutes of a GPU and money for a million images of a row."""
    measured, bare = (1e6 / row[f"{name}_images_per_second"] / 60 for name in ("embed", "network"))
    return {
        "network": f"{row['model']} at {row['size']} px",
        "share of MACs": f"{row['ratio']:.1f}",
        "images/s": round(row["embed_images_per_second"]),
        "minutes per million": measured,
        "cost per million": measured / 60 * price,
        "where reading is no limit": bare / 60 * price,
    }


def main() -> None:
    """Write a table beside the rows."""
    options = parser(__doc__)
    options.add_argument("--rows", type=Path, required=True)
    options.add_argument("--price", type=float, required=True, help="of an hour of the GPU")
    args = options.parse_args()
    about = json.loads(args.rows.read_text(encoding="utf-8"))
    found = [cost(row, args.price) for row in about["rows"]]
    page = (
        f"# What a million images cost\n\n{about['device']}, at a price of {args.price:g} an hour, in "
        f"your currency. Rates of `ltm embed`: [{args.rows.stem}]({args.rows.stem}.md).\nThe last "
        "column is the cost at the rate of the network alone.\n\n"
        + table(found[0], (row.values() for row in found))
    )
    write_text(args.rows.with_name("embed_cost.md"), page + "\n")
    print(page)


if __name__ == "__main__":
    main()
