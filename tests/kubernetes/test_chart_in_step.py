"""What the chart says of the server is true of this server: flags, ports, names, metrics, versions.

Read from the chart's files, without Helm; `test_rendered_chart` has what Helm makes of them.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import yaml
from tests.support.compose_files import ROOT, with_defaults
from tests.support.helm_chart import CHART, EXAMPLES, TEMPLATES

from headrace_facts import facts, step_records
from headrace_health import probe
from headrace_supervisor import commands
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import catalogue
from headrace_telemetry.metrics.step_metrics import StepMetrics

DOCUMENT = ROOT / "docs" / "kubernetes.md"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# Which templates have flags of which command.
FLAGS_OF = {
    "services.yaml": commands.service,
    "_engine.tpl": commands.backend,
    "_ranks.tpl": commands.ranks,
    "_pod.tpl": commands.telemetry,
}


def flags(text: str) -> set[str]:
    """Flags of a template, those of probes and of other programs left out."""
    text = text.replace('--{{ if eq $door "openai" }}openai-{{ end }}listen', "--listen --openai-listen")
    return set(re.findall(r"(?<=[\s\"])--([a-z][a-z-]*)", text))


@pytest.mark.parametrize("template", FLAGS_OF)
def test_flags_of_the_templates_are_the_commands(template: str) -> None:
    known = {option for parameter in FLAGS_OF[template].params for option in parameter.opts}
    used = flags((TEMPLATES / template).read_text())
    assert used and {f"--{name}" for name in used} <= known


@pytest.mark.parametrize("template", FLAGS_OF)
def test_no_option_of_the_values_can_say_what_the_chart_says(template: str) -> None:
    own = re.findall(r"\$(?:own|ranksOwn) :?= list (.*?) }}", (TEMPLATES / "_checks.tpl").read_text())
    refused = dict(zip(FLAGS_OF, (set(re.findall(r'"([a-z-]+)"', names)) for names in own), strict=True))[template]
    # The number of stages is the chart's where an engine has several hosts.
    assert flags((TEMPLATES / template).read_text()) - {"pp"} <= refused
    known = {option for parameter in FLAGS_OF[template].params for option in parameter.opts}
    assert {f"--{name}" for name in refused} <= known, "a flag that is gone"


def test_values_and_schema_name_the_same_settings() -> None:
    def names(values: Any, schema: dict[str, Any], path: str) -> set[str]:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if "properties" not in schema or not isinstance(values, dict):
            return set()
        within = schema["properties"]
        assert schema["additionalProperties"] is False, path
        # Of pods nothing is set by default, of resources only what is needed.
        is_open = path.endswith((".pod", ".resources"))
        missing = set() if is_open else within.keys() - values.keys()
        assert not missing and values.keys() <= within.keys(), (path, missing, values.keys() - within.keys())
        return {path}.union(*(names(value, within[name], f"{path}.{name}") for name, value in values.items()))

    # Helm's own `global` is nobody's default.
    assert len(names({**VALUES, "global": {}}, SCHEMA, "")) > 15


def test_probes_ask_what_processes_answer() -> None:
    text = (TEMPLATES / "_pod.tpl").read_text()
    assert set(re.findall(r"grpc: \{port: [^,]*, service: (\w+)\}", text)) == {probe.ALIVE}
    for template, port in (("services.yaml", 50052), ("_engine.tpl", 50062), ("_ranks.tpl", 50062)):
        text = (TEMPLATES / template).read_text()
        for use in (
            f"--probe=0.0.0.0:{port}",
            f'include "headrace.probes" {port}',
            f"name: probe, containerPort: {port}",
        ):
            assert text.count(use) == 1, (template, use)


def test_ports_are_those_of_the_stack() -> None:
    stack = with_defaults((ROOT / "docker-compose.yml").read_text())
    stack += (ROOT / "deploy" / "compose.secure.yml").read_text()
    for port in (VALUES["services"]["grpc"]["port"], VALUES["telemetry"]["port"], VALUES["engines"]["port"]):
        assert f":{port}" in stack, port


def test_the_metric_that_adds_engines_is_the_servers() -> None:
    name = exposition_name(catalogue.WAITING_TOKENS)
    text = (TEMPLATES / "autoscaling.yaml").read_text()
    assert set(re.findall(r"\bheadrace_\w+", text)) == {name}
    assert name in DOCUMENT.read_text()


def exposition_name(metric: catalogue.Metric) -> str:
    """A gauge's name as Prometheus gets it; its unit is one that no name has."""
    assert metric.kind == "gauge" and metric.unit.startswith("{")
    return metric.name.replace(".", "_")


def test_metrics_of_steps_are_dropped_where_services_tell_them() -> None:
    # What a telemetry process that knows services alone would count again.
    metrics = StepMetrics(TelemetryConfig(telemetry_socket=pathlib.Path("unused")))
    records = np.zeros(3, step_records.RECORD)
    records["step_id"], records["settled_at_ns"] = range(1, 4), range(1, 4)
    records["num_decodes"] = records["num_sequences"] = records["draft_tokens"] = 1
    metrics.take(facts.Steps(engine="0" * 16, unix_offset_ns=0, records=records.tobytes()), False, 0)
    reported = {metric.name.replace(".", "_") for metric in metrics.metrics(0)}
    (dropped,) = re.findall(r"regex: (\(grpc\|openai\);.*)", (TEMPLATES / "metrics.yaml").read_text())
    assert len(reported) >= 4
    for name in reported:
        assert re.fullmatch(dropped, f"grpc;{name}_total") and not re.fullmatch(dropped, f"engine;{name}_total")
    assert not re.fullmatch(dropped, "grpc;gen_ai_server_request_duration_seconds_count")


def test_versions_are_the_servers() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert chart["appVersion"] == chart["version"] == version
    assert f"headrace-service:{version}" in (EXAMPLES / "pull-job.yaml").read_text()
    # The images that `docker compose build` makes.
    assert f"image: {VALUES['image']['prefix']}service:{version}" in (ROOT / "docker-compose.yml").read_text()


def test_the_guide_names_what_there_is() -> None:
    text = DOCUMENT.read_text()
    for name in re.findall(r"deploy/kubernetes/(examples/[\w.-]+)", text):
        assert (CHART / name).is_file(), name
    examples = {path.name for path in EXAMPLES.iterdir()}
    assert {name for name in examples if name in text} == examples
    for path in re.findall(
        r"`((?:image|model|services|engines|telemetry|serviceMonitor|networkPolicy)(?:\.[A-Za-z]+)+)[`:]", text
    ):
        value: Any = VALUES
        for part in path.split("."):
            if part in ("POOL", "pools"):
                break
            assert part in value, f"{path} is no setting"
            value = value[part]
