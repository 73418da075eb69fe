"""Warm-up's many steps go through representative layers alone.

Yet nothing is launched later that they have not launched: by all that Triton, libraries and our
rules tell launches apart by.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from tests.support.compiling import compiled
from tests.support.gguf_writer import from_folder
from tests.support.quantized_folders import Recipe, layer_names, quantize_folder
from tests.support.running_server import DEMO

NUM_LAYERS = 8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
BIASES = {"attention_bias": True, "mlp_bias": True}
FULL, WINDOW = "full_attention", "sliding_attention"
# Norms of heads; windows in layers 3, 4 and 5.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 100,
    "layer_types": [FULL, FULL, FULL, WINDOW, WINDOW, WINDOW, FULL, FULL],
}


def of_config(**changes: Any) -> Callable[[pathlib.Path], str]:
    """Writes a folder without weights; dummy ones take their place."""

    def write(path: pathlib.Path) -> str:
        (path / "config.json").write_text(json.dumps(CONFIG | changes))
        return str(path)

    return write


def of_recipes(recipe: Recipe, forms: Mapping[str, Recipe | None], **config: Any) -> Callable[[pathlib.Path], str]:
    """Quantizes the demo model by a recipe but for the layers whose names begin so."""

    def form(name: str) -> Recipe | None:
        return next((own for start, own in forms.items() if name.startswith(f"model.layers.{start}")), recipe)

    def write(path: pathlib.Path) -> str:
        own = {name: form(name) for name in layer_names(NUM_LAYERS)}
        return str(quantize_folder(DEMO, path, own, recipe.config() | config).path)

    return write


def of_blocks(path: pathlib.Path) -> str:
    """The demo model in a GGUF file whose value and down projections differ from layer to layer."""

    def kind(name: str, shape: tuple[int, ...]) -> str:
        layer = name.removeprefix("model.layers.")[0]
        if "v_proj" in name:
            return "Q6_K" if layer in "25" else "Q4_K"
        return "Q4_K" if "down_proj" not in name else "Q8_0" if layer in "23" else "Q5_0"

    from_folder(DEMO, kind)[0].write(path / "mixed.gguf")
    return str(path / "mixed.gguf")


class Case(NamedTuple):
    """A model, and the layers that launch all that it launches, by their places."""

    write: Callable[[pathlib.Path], str]
    places: list[int]
    # As the program takes them.
    options: Mapping[str, Any] = {}


FOLDER = {"load": "folder"}
FOUR, EIGHT = Recipe("gptq"), Recipe("gptq", bits=8, group=64)
ROUNDS = Recipe("whole", bits=8, group=0, activations="dynamic")
CASES = {
    "llama": Case(of_config(**BIASES), [0, 1, 7]),
    "int4": Case(of_config(), [0, 1, 7], {"quantize": "int4"}),
    "int8, 8-bit cache": Case(of_config(**QWEN3), [0, 1, 3, 7], {"quantize": "int8", "kv_dtype": "int8"}),
    "fp8, 8-bit head": Case(of_config(**BIASES), [0, 1, 7], {"quantize": "fp8", "quantize_head": "fp8"}),
    "nf4, windows": Case(of_config(**QWEN3), [0, 1, 3, 7], {"quantize": "nf4"}),
    "rank 0": Case(of_config(**BIASES), [0, 1, 7], {"quantize": "fp8", "rank": 0}),
    "rank 1": Case(of_config(**QWEN3), [0, 1, 3, 7], {"rank": 1}),
    # Two layers are plain, two of 8 bits, one has a plain value projection beside others of 4 bits.
    "mixed 4 bits": Case(
        of_recipes(
            FOUR,
            {"2.": None, "5.": None, "3.": EIGHT, "6.": EIGHT, "4.self_attn.v_proj": None},
            dynamic={
                r"-:model\.layers\.(2|5)\.": {},
                r"+:model\.layers\.(3|6)\.": {"bits": 8, "group_size": 64},
                r"-:model\.layers\.4\.self_attn\.v_proj": {},
            },
        ),
        [0, 1, 2, 3, 4, 7],
        FOLDER,
    ),
    # Products round their tokens, but for those of two layers and the attention of a third.
    "mixed rounding": Case(
        of_recipes(
            ROUNDS,
            {"2.": None, "5.": None, "4.self_attn.": None},
            ignore=["lm_head", r"re:model\.layers\.(2|5)\..*", r"re:model\.layers\.4\.self_attn\..*"],
        ),
        [0, 1, 2, 4, 7],
        FOLDER,
    ),
    "mixed blocks": Case(of_blocks, [0, 1, 2, 3, 5, 7], FOLDER),
}


# Each case takes 5 to 10 s of a core. Which layers stand for which is in
# tests/models/test_representative_layers every time, and that a GPU's runner takes the steps of
# warm-up in test_profile_and_warm_up.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def records(case: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each way of warming up launched."""
    path = CASES[case].write(tmp_path_factory.mktemp("model"))
    found = compiled("recorded_launches", json.dumps({"path": path, **CASES[case].options}))
    return {record.pop("way"): record for record in found}


def test_representative_layers_launch_all_that_whole_steps_launch(
    case: str, records: dict[str, dict[str, Any]]
) -> None:
    whole, shallow, warm = (records[way]["launches"].keys() for way in ("whole", "shallow", "warm"))
    assert not whole - shallow and not whole - warm
    assert sum(records["shallow"]["launches"].values()) < sum(records["whole"]["launches"].values())
    # Attention alone, in chunks, and gathered where contexts may be deep enough.
    names = {launch.split()[0] for launch in whole}
    assert "raw_decode_kernel" in names and names & {"_paged_kernel", "prefill_kernel_sm90"}
    assert ("_gather_kernel" in names) == (CASES[case].options != FOLDER)


def test_what_sets_layers_apart_is_seen(case: str, records: dict[str, dict[str, Any]]) -> None:
    """The first and the last layer are enough only where all between them are of one kind.

    What the test above compares tells launches of other kinds apart.
    """
    missed = records["whole"]["launches"].keys() - records["ends"]["launches"].keys()
    assert bool(missed) == (len(CASES[case].places) > 3)


def test_warm_up_ends_with_a_few_whole_steps(case: str, records: dict[str, dict[str, Any]]) -> None:
    whole, shallow, warm = (
        # A step in two pieces goes through each layer twice.
        [[place for place, _ in itertools.groupby(places)] for places in records[way]["passes"]]
        for way in ("whole", "shallow", "warm")
    )
    everything = list(range(NUM_LAYERS))
    assert whole == [everything] * len(whole)
    assert shallow == [CASES[case].places] * len(whole)
    assert warm[: len(shallow)] == shallow
    # A prompt and its second token; all rows' decodes; a chunk behind a context; one beside
    # decodes.
    assert warm[len(shallow) :] == [everything] * 5
