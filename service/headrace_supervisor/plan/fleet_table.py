"""How many users fleets of engines hold, and what they cost: the search, the table and its limits.

Owns the search for the most users whose first tokens come in time, from what the arithmetic says of
one engine downwards, and every assumption in words. What happens to the requests is `fleet`'s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.table

from headrace_supervisor.plan.capacity import Demand, Gpu, RankSizes, predict
from headrace_supervisor.plan.fleet import Fleet, Outcome, Simulation

# Shares of what one engine holds by arithmetic, of which the first is taken that holds.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_MOST_USERS = 1 << 20
# Fleets of more engines are first tried as one of so many, which is simulated in seconds.
_PILOT = 100
# Tokens a second that one core of a service streams, one token a message (AMD EPYC, 2026-11-22,
# docs/experiments.md).
_TOKENS_PER_CORE = 37_000.0
_LEAST_WIDTH = 142


class Asked(NamedTuple):
    """What every fleet of the table is asked for; users of `demand` are found."""

    sizes: RankSizes
    gpu: Gpu
    demand: Demand
    services: int
    prefixes: int
    # Share of the engines that are lost at once; at least one is, unless it is 0.
    lost: float
    target_ttft_s: float
    target_itl_s: float | None
    # Of one card; None: money is not counted.
    card_hour: float | None


def fleet_rows(asked: Asked, counts: list[int]) -> list[dict[str, Any]]:
    """Returns a row for each number of engines: the most users that it holds; 0 if there are none.

    Fleets come in rising order; a larger one is not tried with more users an engine than a smaller
    one held, because it only has longer to learn what is popular. So a large one that comes first
    has a small one go before it.
    """
    most, shares = _most_users(asked), list(_SHARES)
    rows: list[dict[str, Any]] = []
    for count in counts:
        row: dict[str, Any] = {"engines": count, "cards": count * asked.sizes.tp, "users": 0, "holds": False}
        if count > _PILOT and not rows:
            shares, _ = _held_shares(asked, _PILOT, most, shares)
        shares, found = _held_shares(asked, count, most, shares)
        if found is not None:
            row |= _held(asked, *found) | {"share_of_arithmetic": shares[0], "holds": True}
        rows.append(row)
    return rows


def _held_shares(
    asked: Asked, count: int, most: int, shares: list[float]
) -> tuple[list[float], tuple[Fleet, Outcome] | None]:
    """Returns the shares from the first one on that a fleet holds, and what it does then.

    All shares and None, if it holds none.
    """
    for index, share in enumerate(shares if most else ()):
        fleet = _fleet(asked, count, max(1, int(share * most)))
        outcome = Simulation(fleet).run()
        if _holds(asked, outcome):
            return shares[index:], (fleet, outcome)
    return shares, None


def _most_users(asked: Asked) -> int:
    """Returns the most users that one engine holds by arithmetic."""

    def holds(users: int) -> bool:
        found = predict(asked.sizes, asked.gpu, asked.demand._replace(users=users))
        return not found.is_overloaded and (asked.target_itl_s is None or found.itl_ms <= asked.target_itl_s * 1e3)

    low, high = 0, _MOST_USERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _fleet(asked: Asked, count: int, users: int) -> Fleet:
    lost = min(count - 1, max(1, round(asked.lost * count))) if asked.lost else 0
    demand = asked.demand._replace(users=users)
    return Fleet(asked.sizes, asked.gpu, count, asked.services, demand, asked.prefixes, lost)


def _holds(asked: Asked, outcome: Outcome) -> bool:
    in_time = outcome.ttft_p95_s <= asked.target_ttft_s
    return in_time and (asked.target_itl_s is None or outcome.itl_p95_s <= asked.target_itl_s)


def _held(asked: Asked, fleet: Fleet, outcome: Outcome) -> dict[str, Any]:
    demand = fleet.demand
    answer_s = predict(asked.sizes, asked.gpu, demand).answer_s
    requests_s = fleet.engines * demand.users / (answer_s + demand.think_s)
    tokens_s = requests_s * demand.output
    row: dict[str, Any] = {
        "users": fleet.engines * demand.users,
        "requests_per_s": requests_s,
        "output_tokens_per_s": tokens_s,
        "service_cores": tokens_s / _TOKENS_PER_CORE,
        "ttft_p50_ms": outcome.ttft_p50_s * 1e3,
        "ttft_p95_ms": outcome.ttft_p95_s * 1e3,
        "itl_p95_ms": outcome.itl_p95_s * 1e3,
        "cached_share": outcome.hit_share if demand.cached else None,
        "lost_engines": fleet.lost,
        "moved_streams": outcome.moved,
        "pause_p99_ms": outcome.pause_p99_s * 1e3,
        "choice_us": outcome.choice_s * 1e6,
        "simulated_requests": outcome.choices,
    }
    if asked.card_hour is not None:
        hour = fleet.engines * asked.sizes.tp * asked.card_hour
        row |= {"per_hour": hour, "per_million_output_tokens": hour / (tokens_s * 3600) * 1e6}
    return row


def print_fleets(asked: Asked, rows: list[dict[str, Any]], card: str, users: int | None) -> None:
    """Prints the table, what a number of users takes, and what was assumed."""
    titles = ["engines", "cards", "users", "requests/s", "TTFT ms p50", "p95", "ITL p95", "cached", "moved"]
    titles += ["pause p99", "service cores"]
    if asked.card_hour is not None:
        titles += ["an hour", "1M tokens"]
    table = rich.table.Table(box=rich.box.SIMPLE)
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*_cells(row, len(titles)))
    console = rich.console.Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)
    for line in [_answer(asked, rows, users), *_assumptions(asked, card)]:
        if line:
            console.print(line, markup=False, soft_wrap=True)


def _cells(row: dict[str, Any], count: int) -> list[str]:
    start = [f"{row['engines']:,}", f"{row['cards']:,}", f"{row['users']:,}"]
    if not row["holds"]:
        return [*start, "too slow", *[""] * (count - 4)]
    times = (f"{row[name]:,.0f}" for name in ("requests_per_s", "ttft_p50_ms", "ttft_p95_ms"))
    cached = "" if row["cached_share"] is None else f"{row['cached_share']:.1%}"
    cells = [*start, *times, f"{row['itl_p95_ms']:.1f}", cached]
    cells += [f"{row['moved_streams']:,}", f"{row['pause_p99_ms']:,.0f}", f"{row['service_cores']:,.1f}"]
    return cells + ([f"{row['per_hour']:,.0f}", f"{row['per_million_output_tokens']:.3f}"] if "per_hour" in row else [])


def _answer(asked: Asked, rows: list[dict[str, Any]], users: int | None) -> str:
    """Says how many engines a number of users takes, by the largest fleet that holds any."""
    held = [row for row in rows if row["holds"]]
    if users is None or not held:
        return ""
    enough = [row for row in held if row["users"] >= users]
    base = min(enough, key=lambda row: row["engines"]) if enough else held[-1]
    engines = max(1, -(-users * base["engines"] // base["users"]))
    cards = engines * asked.sizes.tp
    money = "" if asked.card_hour is None else f", {cards * asked.card_hour:,.0f} an hour"
    known = "" if enough else f"; no fleet here holds them, so this is {base['engines']:,} engines' rate carried on"
    return f"{users:,} users take {engines:,} engines, {cards:,} cards{money}{known}."


def _assumptions(asked: Asked, card: str) -> list[str]:
    demand = asked.demand
    shared = (
        f"of which {demand.cached:,} are one of {asked.prefixes:,} shared beginnings (Zipf's law)"
        if demand.cached
        else "of which nothing is shared"
    )
    price = (
        "" if asked.card_hour is None else f" Money: {asked.card_hour:g} for a card and hour, as given; cards alone."
    )
    return [
        f"Simulated with the routing of services, of which there are {asked.services}. Assumed: prompts of "
        f"{demand.prompt:,} tokens, {shared}, answers of {demand.output:,}, users who think {demand.think_s:g} s; "
        f"engines of {asked.sizes.tp} {card}, as fast as `headrace plan` takes one to be; "
        f"first tokens within {asked.target_ttft_s * 1e3:,.0f} ms (p95); {asked.lost:.1%} of the engines, at least "
        f"one, lost at once (the busiest), whose streams move and pause; a core of a service for "
        f"{_TOKENS_PER_CORE:,.0f} tokens/s.{price}",
        "Not in it: lengths other than the means, earlier turns that are still cached, days and nights, several "
        "tenants, time on the network, engines that differ, how long a lost engine takes to come back. Fleets of more "
        "than 2,000 engines are simulated for less time, in which services are still learning what is popular.",
    ]
