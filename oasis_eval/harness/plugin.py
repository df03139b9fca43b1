"""The suite inside lm-eval's own command line: model type `oasis` and our tasks.

lm-eval 0.4.13 discovers no plugins, so `main` registers both and hands over. Releases that read the
entry point `lm_eval.models` find the model type by themselves.
"""

from __future__ import annotations

import importlib.metadata
import sys
from contextlib import ExitStack
from typing import Any

from oasis_eval import registry
from oasis_eval.errors import SpecError
from oasis_eval.harness import hook
from oasis_eval.harness.lm import OasisLM
from oasis_eval.harness.protocols import VERSIONS
from oasis_eval.loading import load, prepare
from oasis_eval.quant.schemes import resolve
from oasis_eval.spec import Dtype


class PluginLM(OasisLM):
    """Model type `oasis`: `--model_args model=CARD_OR_PATH,scheme=w4a4`."""

    def __init__(  # noqa: PLR0913 - lm-eval hands every option over as a keyword
        self,
        model: str,
        *,
        scheme: str = "fp32",
        dtype: Dtype | None = None,
        calibration: str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **unknown: object,
    ) -> None:
        """Load and prepare a model as `oasis-eval evaluate` would.

        Args:
            model: What `evaluate` takes: a card, folder, GGUF file, package or hub id.
            scheme: Preset name or YAML file.
            dtype: Compute dtype; default fp32 on the CPU, bf16 elsewhere.
            calibration: Local file that replaces the scheme's calibration text.
            batch_size: A number: the batch changes results under dynamic ranges, so none is
                chosen automatically.
            device: `cpu`, `cuda`, ...
            max_batch_size: Accepted for lm-eval's sake; must not be given.
            unknown: Anything else is refused by name.
        """
        if unknown:
            raise SpecError(
                f"--model_args: unknown {sorted(unknown)[0]!r}; "
                "known: model, scheme, dtype, calibration"
            )
        if not str(batch_size).isdigit() or max_batch_size is not None:
            raise SpecError(f"--batch_size {batch_size!r}: expected a number, not 'auto'")
        place = _device(device)
        compute: Dtype = dtype or ("fp32" if place == "cpu" else "bf16")
        chosen = resolve(scheme)
        reference = load(registry.resolve(model), dtype=chosen.dtype or compute, device=place)
        # lm-eval keeps the model until the process ends, and so the scheme stays on.
        self._prepared = ExitStack()
        prepared = self._prepared.enter_context(
            prepare(reference, chosen, dtype=compute, calibration_data=calibration, last=True)
        )
        super().__init__(prepared, batch_size=int(batch_size))

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval's result file should say about the model.

        `results` makes records of it; protocol versions are there because the file has only the
        tasks' own.
        """
        return {
            "oasis_version": importlib.metadata.version("oasis-eval"),
            "oasis_card": self.prepared.card.model_dump(mode="json"),
            "oasis_checkpoint_sha256": self.prepared.digest,
            "oasis_scheme": self.prepared.scheme.name,
            "oasis_scheme_settings": self.prepared.scheme.model_dump(mode="json"),
            "oasis_dtype": self.prepared.dtype,
            "oasis_device": self.prepared.device,
            "oasis_attention": self.prepared.attention,
            "oasis_warnings": list(self.prepared.warnings),
            "oasis_protocol_versions": dict(VERSIONS),
        }


def _device(asked: str | None) -> str:
    """Return where to run; lm-eval asks for `cuda:0` whenever its user asked for nothing."""
    import torch

    if asked == "cuda:0" and not torch.cuda.is_available():
        print("no CUDA device here: running on the CPU", file=sys.stderr)  # noqa: T201 - a notice
        return "cpu"
    return asked or "cpu"


def register() -> None:
    """Make the model type and our tasks known to lm-eval; a second call changes nothing."""
    import lm_eval.api.registry
    import lm_eval.tasks.manager

    hook.add_model(lm_eval.api.registry)
    hook.add_tasks(lm_eval.tasks.manager)


def main(arguments: list[str]) -> None:
    """Run lm-eval's command line with our model type and tasks registered.

    Args:
        arguments: What lm-eval would get, for example `["run", "--model", "oasis", ...]`.
    """
    from lm_eval.__main__ import cli_evaluate

    register()
    before = sys.argv
    sys.argv = ["oasis-eval harness", *arguments]
    try:
        cli_evaluate()
    except (ValueError, KeyError) as error:
        # lm-eval's own way to say that a task or an argument does not exist.
        raise SpecError(f"lm-eval: {' '.join(str(error).split())[:300]}") from error
    finally:
        sys.argv = before
