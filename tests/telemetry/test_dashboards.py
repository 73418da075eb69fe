"""Dashboards and alerts ask for what there is.

Every selector of every query finds series in the endpoint's output, and in a real Prometheus every
query finds data.

The real one is HEADRACE_PROMETHEUS or `prometheus` on the path, `promtool` beside it, or that of a
running stack, HEADRACE_PROMETHEUS_URL; without them those tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.samples import Sample
from tests.support import reported_facts as reported

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import Metrics, catalogue, exposition

_ROOT = pathlib.Path(__file__).parents[2]
_DEPLOY = _ROOT / "deploy"
_DASHBOARDS = sorted((_DEPLOY / "grafana/dashboards").glob("*.json"))
_ALERTS = _DEPLOY / "prometheus/alerts.yml"
_OPERATIONS = _ROOT / "docs/operations.md"
_PROMETHEUS = os.environ.get("HEADRACE_PROMETHEUS") or shutil.which("prometheus")
# A Prometheus that scrapes a server under load.
_RUNNING = os.environ.get("HEADRACE_PROMETHEUS_URL")
# Without speculation no draft is verified, so there is no share of them.
_MAY_BE_EMPTY = {"tokens: Accepted share: A"}

_SELECTOR = re.compile(r"\b((?:headrace|gen_ai_server|rpc_server)_\w+)\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|group_left|group_right)\s*\(([^)]*)\)")
_LIMIT = re.compile(r"\s*(?:>|==)\s*[\d.]+")


class Query(NamedTuple):
    """An expression and where it stands."""

    place: str
    expression: str


def _panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _dashboard_queries() -> Iterator[Query]:
    for path in _DASHBOARDS:
        for panel in _panels(json.loads(path.read_text())):
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "10s").replace("$model", ".*")
                yield Query(f"{path.stem}: {panel['title']}: {target['refId']}", expression)


def _alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(_ALERTS.read_text())["groups"] for rule in group["rules"]]


def _alert_queries() -> Iterator[Query]:
    for rule in _alerts():
        yield Query(f"alert {rule['alert']}", rule["expr"])


_QUERIES = [*_dashboard_queries(), *_alert_queries()]


def _metrics(**settings: Any) -> Metrics:
    config = TelemetryConfig(
        telemetry_socket=pathlib.Path("unused"), metrics_listen="127.0.0.1:0", price_per_hour=3.0, **settings
    )
    return Metrics(config, ExportCounts())


def _tell(metrics: Metrics, round_: int) -> None:
    for source, fact in reported.everything(1 + 20 * round_, 1 + round_):
        if isinstance(fact, facts.Generation):
            metrics.sink.generation(source, fact, "head")
        else:
            metrics.sink.take(source, fact)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """What the endpoint tells when everything has happened."""
    metrics = _metrics()
    for source in (reported.SERVICE, reported.BACKEND):
        metrics.sink.take(source, source)
    _tell(metrics, 0)
    text = metrics.render(exposition.OPENMETRICS).decode()
    return [sample for family in parse_openmetrics(text) for sample in family.samples]


def _matches(sample: Sample, name: str, matchers: list[tuple[str, str, str]]) -> bool:
    if sample.name != name:
        return False
    for label, operator, value in matchers:
        actual = sample.labels.get(label, "")
        equal = bool(re.fullmatch(value, actual)) if "~" in operator else actual == value
        if equal == operator.startswith("!"):
            return False
    return True


@pytest.mark.parametrize("query", _QUERIES, ids=lambda query: query.place)
def test_every_selector_finds_series_that_have_its_labels(query: Query, samples: list[Sample]) -> None:
    grouped = {label.strip() for labels in _GROUPING.findall(query.expression) for label in labels.split(",")} - {""}
    bare = _GROUPING.sub("", query.expression)
    found = list(_SELECTOR.finditer(bare))
    assert found or "up{" in bare
    known: set[str] = set()
    for selector in found:
        matchers = _MATCHER.findall(selector.group(2) or "")
        series = [sample for sample in samples if _matches(sample, selector.group(1), matchers)]
        assert series, f"nothing is reported that {selector.group(0)} selects"
        assert {label for label, _, _ in matchers} <= set(series[0].labels)
        known |= set(series[0].labels)
    assert grouped <= known, f"nothing has the labels {grouped - known}"


@pytest.mark.parametrize("path", _DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_described_apart_and_fed_by_the_provisioned_source(path: pathlib.Path) -> None:
    board = json.loads(path.read_text())
    sources = yaml.safe_load((_DEPLOY / "grafana/provisioning/datasources/headrace.yml").read_text())["datasources"]
    provisioned = {(source["type"], source["uid"]) for source in sources}
    panels = _panels(board)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["title"] and len(panel["description"]) > 20
        assert all((part["datasource"]["type"], part["datasource"]["uid"]) in provisioned for part in panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations((panel["gridPos"] for panel in board["panels"]), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_there_are_the_four_dashboards_under_names_of_their_own() -> None:
    assert [path.stem for path in _DASHBOARDS] == ["cache", "serving", "steps", "tokens"]
    boards = [json.loads(path.read_text()) for path in _DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 4


def test_every_metric_is_in_a_panel_or_an_alert() -> None:
    asked = " ".join(query.expression for query in _QUERIES)
    names = {exposition.base_name(metric.name, metric.unit, metric.kind) for metric in catalogue.ALL}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}(_total|_bucket|_sum|_count)?\b", asked)] == []


def test_exemplars_of_panels_lead_to_the_traces_of_a_source() -> None:
    sources = yaml.safe_load((_DEPLOY / "grafana/provisioning/datasources/headrace.yml").read_text())["datasources"]
    (prometheus,) = [source for source in sources if source["type"] == "prometheus"]
    inside, page = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert inside["name"] == page["name"] == "trace_id"
    assert inside["datasourceUid"] in {source["uid"] for source in sources}
    # Viewers have no Explore, which the other one leads to.
    assert page["url"] == "$JAEGER_PAGE/trace/$${__value.raw}"
    marked = [
        [target["expr"] for target in panel["targets"] if target.get("exemplar")]
        for path in _DASHBOARDS
        for panel in _panels(json.loads(path.read_text()))
    ]
    assert all("_bucket" in expression for expressions in marked for expression in expressions)
    # Each one is a query of its own, which finds the same dots for all quantiles of a histogram.
    assert max(map(len, marked)) == 1


@pytest.mark.parametrize("path", _DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_take_what_grafana_would_choose_badly(path: pathlib.Path) -> None:
    for panel in _panels(json.loads(path.read_text())):
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            # Without it a number is green, and red from 80 on, whatever it means.
            assert defaults["color"]["mode"] == "fixed" or defaults["thresholds"]["steps"], panel["title"]
            # Of a machine without requests, a quantile or a share would read NaN.
            assert defaults["mappings"][0]["options"]["match"] == "null+nan", panel["title"]
            # One instant is no line behind the number.
            assert all(target["range"] and not target.get("instant") for target in panel["targets"])
        if panel["type"] == "timeseries":
            # "never" hides a value that has no neighbours.
            assert defaults["custom"]["showPoints"] == "auto", panel["title"]
        if defaults.get("custom", {}).get("scaleDistribution", {}).get("type") == "log":
            assert "min" not in defaults, "there is no zero on such an axis"


def test_a_fault_is_red_and_a_whole_answer_is_not() -> None:
    (serving,) = [json.loads(path.read_text()) for path in _DASHBOARDS if path.stem == "serving"]
    colors = {
        override["matcher"]["options"]: setting["value"]["fixedColor"]
        for panel in _panels(serving)
        for override in panel["fieldConfig"]["overrides"]
        for setting in override["properties"]
        if setting["id"] == "color"
    }
    assert colors["stop"] == colors["OK"] == "green"
    assert {name for name, color in colors.items() if color == "red"} == {
        "error",
        "/^(INTERNAL|UNKNOWN|UNAVAILABLE|DATA_LOSS)$/",
    }


def test_every_alert_is_explained_in_the_operations_guide() -> None:
    guide = _OPERATIONS.read_text()
    for rule in _alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        # 0.4 a second would read "400m".
        assert "| humanize }}" not in rule["annotations"]["description"]
        assert f"`{rule['alert']}`" in guide


def test_the_operations_guide_names_the_metrics_that_there_are_and_all_of_them() -> None:
    names = {exposition.base_name(metric.name, metric.unit, metric.kind) for metric in catalogue.ALL}
    mentioned = set(re.findall(r"`((?:headrace|gen_ai_server|rpc_server)_\w+)[`{]", _OPERATIONS.read_text()))
    labels = {value.replace(".", "_") for value in vars(catalogue).values() if isinstance(value, str)}
    mentioned -= labels
    bare = {name if name in names else re.sub(r"_(total|bucket|sum|count)$", "", name) for name in mentioned}
    assert bare == names


def _promtool() -> str:
    tool = pathlib.Path(_PROMETHEUS).with_name("promtool") if _PROMETHEUS else None
    if tool is None or not tool.exists():
        pytest.skip("needs promtool; HEADRACE_PROMETHEUS names the prometheus beside it")
    return str(tool)


def test_every_alert_fires_when_it_must_and_only_then(tmp_path: pathlib.Path) -> None:
    tool = _promtool()
    cases = pathlib.Path(__file__).with_name("alert_cases.yml")
    for path in (cases, _ALERTS):
        shutil.copy(path, tmp_path)
    # A new alert has a case.
    assert all(cases.read_text().count(rule["alert"]) >= 2 for rule in _alerts())
    done = subprocess.run(
        [tool, "test", "rules", cases.name], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_of_prometheus_is_valid(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [_promtool(), "check", "config", str(_DEPLOY / "prometheus/prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.asynccontextmanager
async def _prometheus(folder: pathlib.Path, target_port: int) -> AsyncIterator[str]:
    """A real Prometheus with our rules that scrapes one port every second; its address."""
    assert _PROMETHEUS
    config = yaml.safe_load((_DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(_ALERTS, folder)
    server = await asyncio.create_subprocess_exec(
        _PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
        stderr=asyncio.subprocess.PIPE,
    )
    assert server.stderr is not None
    log = server.stderr
    lines: list[str] = []

    async def read() -> None:
        while line := await log.readline():
            lines.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(120):
            while not (address := _address("".join(lines))):
                assert server.returncode is None, "".join(lines)
                await asyncio.sleep(0.05)
            # It listens before it answers.
            while not await asyncio.to_thread(_is_ready, address):
                await asyncio.sleep(0.05)
        yield address
    finally:
        server.terminate()
        await server.wait()
        await reading


def _address(log: str) -> str | None:
    # Version 2 and version 3.
    found = re.search(r"[Ll]istening on\"?(?: component=web)? address=\"?(127\.0\.0\.1:\d+)", log)
    return f"http://{found.group(1)}" if found else None


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=60):
            return True
    except urllib.error.HTTPError:
        return False


async def _ask(address: str, path: str, **parameters: str) -> Any:
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

    def fetch() -> Any:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.load(reply)

    return (await asyncio.to_thread(fetch))["data"]


async def _has_data(address: str, expression: str) -> bool:
    result = (await _ask(address, "query", query=expression))["result"]
    return any(not math.isnan(float(series["value"][1])) for series in result)


def _questions() -> Iterator[Query]:
    """Returns all queries, alerts without their limits.

    Each side of "and" and "or" stands by itself, because nothing is wrong most of the time.
    """
    yield from _dashboard_queries()
    for query in _alert_queries():
        for side in re.split(r"\s+(?:and|or)\s+(?!vector)", query.expression):
            if "absent" not in side:
                yield Query(query.place, _LIMIT.sub("", side))


@pytest.mark.skipif(not _PROMETHEUS, reason="needs a Prometheus: HEADRACE_PROMETHEUS or on the path")
async def test_every_query_finds_data_in_a_real_prometheus(tmp_path: pathlib.Path) -> None:
    metrics = _metrics()
    for source in (reported.SERVICE, reported.BACKEND):
        metrics.sink.take(source, source)
    port = await metrics.start()
    assert port is not None

    async def keep_telling() -> None:
        for round_ in itertools.count():
            _tell(metrics, round_)
            await asyncio.sleep(0.2)

    telling = asyncio.create_task(keep_telling())
    try:
        async with _prometheus(tmp_path, port) as address:
            # Discovery of targets takes seconds, and a rate takes several scrapes.
            async with asyncio.timeout(120):
                while not await _has_data(address, "count_over_time(headrace_steps_total[10s]) >= 4"):
                    await asyncio.sleep(0.2)
            empty = [query for query in _questions() if not await _has_data(address, query.expression)]
            assert empty == []
            rules = await _ask(address, "rules")
            assert {rule["health"] for group in rules["groups"] for rule in group["rules"]} == {"ok"}
            exemplars = await _ask(
                address,
                "query_exemplars",
                query="gen_ai_server_time_to_first_token_seconds_bucket",
                start="0",
                end="9999999999",
            )
            ids = {exemplar["labels"]["trace_id"] for series in exemplars for exemplar in series["exemplars"]}
            # Small numbers are ours; how many rounds there were depends on the machine.
            assert ids and all(0 < int(trace_id, 16) < 100_000 for trace_id in ids)
    finally:
        telling.cancel()
        await metrics.close(0)


@pytest.mark.slow
@pytest.mark.skipif(not _RUNNING, reason="needs a stack under load: HEADRACE_PROMETHEUS_URL=http://127.0.0.1:9090")
async def test_every_query_finds_data_in_a_running_stack() -> None:
    assert _RUNNING
    asked = [
        # Rates over 10 s are for the scrapes of the test above.
        Query(query.place, query.expression.replace("[10s]", "[2m]"))
        for query in _questions()
    ]
    empty = {query.place for query in asked if not await _has_data(_RUNNING, query.expression)}
    assert empty - _MAY_BE_EMPTY == set()
