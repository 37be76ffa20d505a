"""A plugin for axolotl: ``plugins: [resume_adapters.axolotl.ResumePlugin]`` in its YAML makes a training resume.

Options go below ``resume_adapters:`` in the same file, by the names that ``RESUME_ADAPTERS_OPTIONS`` has::

    plugins: [resume_adapters.axolotl.ResumePlugin]
    resume_adapters: {keep_last: 3, save_every: 30m}
"""

from __future__ import annotations

from typing import Any

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    from resume_adapters.errors import MissingFramework

    raise MissingFramework(
        "resume_adapters.axolotl is a plugin for axolotl, which is not installed: in another script, use "
        "resume_adapters.hf.ResumeCallback"
    ) from error

from pydantic import BaseModel  # axolotl needs it too

from resume_adapters.core.session.options import options_of_mapping
from resume_adapters.hf import ResumeCallback

__all__ = ["ResumePlugin"]


class ResumeArguments(BaseModel):
    """What the plugin adds to axolotl's configuration.

    Attributes:
        resume_adapters: the options, by name.
    """

    resume_adapters: dict[str, Any] | None = None


class ResumePlugin(BasePlugin):  # type: ignore[misc]  # known where axolotl is installed
    """Adds a :class:`~resume_adapters.hf.ResumeCallback` to axolotl's trainer."""

    def get_input_args(self) -> str:
        """Return the name of the model of what the plugin reads from the YAML."""
        return f"{__name__}.{ResumeArguments.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[ResumeCallback]:
        """Return the callback, with the options of the YAML.

        Raises:
            UnsupportedSetting: an option is invalid.
        """
        given = cfg.get("resume_adapters") or {}
        return [ResumeCallback(**options_of_mapping(dict(given), "resume_adapters in axolotl's YAML"))]
