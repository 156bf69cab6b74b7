"""The artifact that passes from stage to stage. Stored runs of flows import it from here."""

from ptf.artifact import Artifact

__all__ = ["Artifact"]
