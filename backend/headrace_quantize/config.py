"""What `headrace quantize` was asked for: one frozen object, from command line to process.

No torch.

Owns each option's name, range, default and words, and the rules between options. What depends on
the model's folder is in `checks`.
"""

from __future__ import annotations

from typing import Literal, Self

import pydantic

GROUP_SIZES = (32, 64, 128)
CHANNEL = "channel"
# Results of this room's arithmetic; a run that was begun by another version can't be resumed.
VERSION = 2
_MOST_SAMPLES = 1 << 16


class QuantizeConfig(pydantic.BaseModel):
    """The command's arguments and options, by their names."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    model_folder: str = pydantic.Field(description="folder of the model in bf16, fp16 or fp32")
    out_folder: str = pydantic.Field(description="folder that is made, or goes on to be made with --resume")
    method: Literal["rtn", "gptq", "awq"] = pydantic.Field(
        "gptq",
        description=(
            "rtn rounds to nearest, gptq makes up for each rounding in the weights behind it, awq scales inputs that "
            "matter before it rounds"
        ),
    )
    scheme: Literal["int", "fp8"] = pydantic.Field(
        "int", description="integers of --bits, or e4m3 with a scale per output (--method rtn only)"
    )
    bits: Literal[4, 8] = pydantic.Field(4, description="of an integer")
    group_size: Literal[32, 64, 128, "channel"] | None = pydantic.Field(
        None, description="inputs that share a scale; default: 128 of 4 bits, channel (all of an output's) of 8"
    )
    symmetric: bool = pydantic.Field(
        True,
        description=(
            "without zero points; --asymmetric is nearer to the weights, and transformers reads it with "
            "dequantize=True only"
        ),
    )
    act_order: bool = pydantic.Field(
        False, description="gptq: inputs with the largest activations first; groups stay where they are"
    )
    clip: bool | None = pydantic.Field(
        None, description="awq: search each group's range for what changes outputs least; default: on"
    )
    damping: float = pydantic.Field(
        0.01, gt=0, le=1, description="gptq: added to the Hessian's diagonal, as a share of its mean"
    )
    calibration: tuple[str, ...] = pydantic.Field((), description="UTF-8 text to calibrate on; may be repeated")
    evaluation: str | None = pydantic.Field(
        None, description="UTF-8 text to measure with; default: the tail of the calibration text, never calibrated on"
    )
    samples: int = pydantic.Field(128, ge=1, le=_MOST_SAMPLES, description="pieces of text to calibrate on")
    sequence_length: int = pydantic.Field(512, ge=8, le=1 << 20, description="tokens of a piece")
    keep: tuple[str, ...] = pydantic.Field(
        (), description="layers that stay as they are, as in down_proj or model.layers.0.*; may be repeated"
    )
    device: Literal["auto", "cpu", "cuda"] = pydantic.Field("auto", description="where to compute")
    threads: int = pydantic.Field(0, ge=0, le=4096, description="of the CPU; 0: one per core")
    resume: bool = pydantic.Field(False, description="go on with what the same command left unfinished in OUT_FOLDER")

    @pydantic.model_validator(mode="after")
    def _options_fit_together(self) -> Self:
        for option, given, fits, rule in (
            ("--act-order", self.act_order, self.method == "gptq", "goes with --method gptq"),
            ("--damping", "damping" in self.model_fields_set, self.method == "gptq", "goes with --method gptq"),
            ("--samples", "samples" in self.model_fields_set, self.calibration, "goes with --calibration"),
            (
                "--sequence-length",
                "sequence_length" in self.model_fields_set,
                self.has_text,
                "goes with --calibration or --evaluation",
            ),
            ("--clip", self.clip is not None, self.method == "awq", "goes with --method awq"),
            ("--scheme fp8", self.scheme == "fp8", self.method == "rtn", "goes with --method rtn"),
            (
                "--scheme fp8",
                self.scheme == "fp8",
                self.group_size in (None, CHANNEL),
                "goes with --group-size channel",
            ),
            ("--scheme fp8", self.scheme == "fp8", self.symmetric, "has no zero points (--asymmetric)"),
            ("--scheme fp8", self.scheme == "fp8", "bits" not in self.model_fields_set or self.bits == 8, "has 8 bits"),
            (f"--method {self.method}", self.method != "rtn", self.calibration, "needs --calibration TEXT_FILE"),
        ):
            if given and not fits:
                raise ValueError(f"{option} {rule}")
        return self

    @property
    def has_text(self) -> bool:
        """Whether text passes through the model, to calibrate on or to measure with."""
        return bool(self.calibration or self.evaluation)

    @property
    def number_bits(self) -> int:
        """Bits of a weight's number, without scales."""
        return 8 if self.scheme == "fp8" else self.bits

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None: all of an output's."""
        if self.group_size is None:
            return 128 if self.number_bits == 4 else None
        return None if self.group_size == CHANNEL else int(self.group_size)

    @property
    def clips(self) -> bool:
        """Whether ranges are searched."""
        return self.method == "awq" and self.clip is not False
