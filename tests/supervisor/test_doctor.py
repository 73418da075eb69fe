"""What `headrace doctor` concludes from the cards that torch sees."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest
from tests.model_folder.folders import write_folder as write_header_folder
from tests.service.model_folder import write_model_folder
from tests.support.mtp_models import write_mtp_model
from tests.support.quantized_folders import Recipe, quantize_folder
from tests.support.running_server import DEMO

from headrace_supervisor import doctor
from headrace_supervisor.doctor import Verdict


@pytest.mark.parametrize(
    ("card", "verdict", "said"),
    [
        (("NVIDIA H200", 9, 0, 141 << 30), Verdict.OK, "compute capability 9.0, 141 GiB, driver 580.1"),
        (("NVIDIA A10", 8, 6, 24 << 30), Verdict.OK, "not measured on this card; kernels are compiled for it in tests"),
        (("Tesla T4", 7, 5, 15 << 30), Verdict.LIMITED, "the kernels need 8.0 or more; --device cpu works"),
    ],
)
def test_a_card_is_judged_by_its_capability_and_name(
    monkeypatch: pytest.MonkeyPatch, card: tuple[str, int, int, int], verdict: Verdict, said: str
) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.1")
    (finding,) = doctor._gpus([card], "13.0")
    assert finding.verdict is verdict and said in finding.detail
    assert ("not measured" in finding.detail) == (card[0] == "NVIDIA A10")


@pytest.mark.parametrize(
    ("driver", "error", "said"),
    [
        ("", "", "no NVIDIA driver, torch for 13.0"),
        (
            "470.82",
            "The NVIDIA driver on your system is too old (found version 11040).",
            "driver 470.82, too old, torch for 13.0",
        ),
        ("580.1", "No CUDA GPUs are available", "driver 580.1, torch for 13.0"),
    ],
)
def test_no_card_says_why_and_offers_the_cpu(
    monkeypatch: pytest.MonkeyPatch, driver: str, error: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: driver)
    (finding,) = doctor._gpus([], "13.0", error)
    assert finding.verdict is Verdict.LIMITED
    assert said in finding.detail and "models run on the CPU" in finding.detail


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TP", "3", "tp is 3, which does not divide num_attention_heads 8; tp 1, 2, 4, 8 work"),
        ("TP", "x", "HEADRACE_TP"),
    ],
)
def test_a_model_is_judged_with_the_settings_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("HEADRACE_")]:
        monkeypatch.delenv(variable)
    assert doctor._model(DEMO).verdict is Verdict.OK
    monkeypatch.setenv(f"HEADRACE_{name}", value)
    finding = doctor._model(DEMO)
    assert finding.verdict is Verdict.MISSING and said in finding.detail


def test_code_of_a_models_own_is_mentioned(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("draft", "scripts"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    finding = doctor._model(folder)
    assert finding.verdict is Verdict.OK and finding.detail.endswith("; code of its own (auto_map) is not run")
    assert "auto_map" not in doctor._model(DEMO).detail


def test_a_layer_that_drafts_is_looked_for_where_it_is_announced(tmp_path: pathlib.Path) -> None:
    config = {
        **{"architectures": ["Glm4MoeForCausalLM"], "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    }
    for announced, said in ((1, "--speculate mtp does not work: config.json announces an MTP layer"), (0, None)):
        folder = write_header_folder(tmp_path / str(announced), config | {"num_nextn_predict_layers": announced})
        shutil.copy(DEMO / "tokenizer.json", folder)
        finding = doctor._model(folder)
        assert finding.verdict is Verdict.OK
        assert ("mtp" in finding.detail) == (said is not None) and (said or "") in finding.detail
    folder = write_mtp_model(tmp_path / "whole", vocab_size=4096)
    shutil.copy(DEMO / "tokenizer.json", folder)
    assert "has an MTP layer: --speculate mtp works" in doctor._model(folder).detail


def test_recommendations_that_requests_do_not_get_are_mentioned(tmp_path: pathlib.Path) -> None:
    write_model_folder(tmp_path / "bent")
    (tmp_path / "bent" / "headrace.toml").write_text('load = "dummy"\ndevice = "cpu"\n')
    (tmp_path / "bent" / "generation_config.json").write_text(json.dumps({"temperature": 0.001, "num_beams": 4}))
    said = (
        "; generation_config.json: temperature 0.001 is served as 0.01: requests take 0, or 0.01 to 100"
        "; generation_config.json: num_beams (4) has no effect"
    )
    assert [finding.detail.endswith(said) for finding in doctor._repository(tmp_path)] == [True]
    folder = tmp_path / "bent-weights"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("draft", "scripts"))
    shutil.copy(tmp_path / "bent" / "generation_config.json", folder)
    assert doctor._model(folder).detail.endswith(said) and doctor._model(folder).verdict is Verdict.OK
    assert "generation_config" not in doctor._model(DEMO).detail


def test_each_model_of_a_repository_is_judged_alone(tmp_path: pathlib.Path) -> None:
    for name in ("bad", "good", "stated"):
        write_model_folder(tmp_path / name)
        # No weights are needed to serve dummy ones.
        (tmp_path / name / "headrace.toml").write_text('load = "dummy"\ndevice = "cpu"\n')
    (tmp_path / "bad" / "config.json").write_text("{}")
    (tmp_path / "stated" / "headrace.toml").write_text('load = "dummy"\nmemory_budget = "3GiB"\n')
    found = {finding.subject: finding for finding in doctor._repository(tmp_path)}
    assert found["model bad"].verdict is Verdict.LIMITED and "config.json" in found["model bad"].detail
    assert found["model good"].detail == "can be loaded, no memory budget"
    assert found["model stated"].verdict is Verdict.OK and "3.00 GiB" in found["model stated"].detail
    (nothing,) = doctor._repository(tmp_path / "good")
    assert nothing.verdict is Verdict.LIMITED and "no subfolder" in nothing.detail


# Folders and files that are packed wrongly are judged in tests/packing.
@pytest.mark.slow
def test_weights_that_are_packed_wrongly_are_damaged_and_named(tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(DEMO, tmp_path, Recipe("gptq", group=64))
    assert [(finding.subject, finding.verdict) for finding in doctor._weights(folder.path)] == [("weights", Verdict.OK)]
    layer = "model.layers.3.mlp.down_proj"
    folder.tensors[f"{layer}.scales"] = folder.tensors[f"{layer}.scales"].roll(1, 0)
    folder.rewrite()
    found = list(doctor._weights(folder.path))
    assert found and all(finding.verdict is Verdict.DAMAGED for finding in found)
    assert f"layer '{layer}': its scales" in found[0].detail
    assert not doctor.can_serve(found)


# Folders are judged in tests/packing, and the command reads one in the test above.
@pytest.mark.slow
def test_plain_weights_are_read_and_weights_that_no_server_loads_are_reported(tmp_path: pathlib.Path) -> None:
    (finding,) = doctor._weights(DEMO)
    assert finding == doctor.Finding("weights", Verdict.OK, "every number is finite")
    broken = pathlib.Path(shutil.copytree(DEMO, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    # Not a number, as the last of the last tensor.
    data[-2:] = b"\xc0\x7f"
    weights.write_bytes(data)
    (finding,) = doctor._weights(broken)
    assert finding.verdict is Verdict.MISSING and "finite" in finding.detail
