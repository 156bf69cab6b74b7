"""The publish stage: pass the gates, then make a version appear (ptf.publishing)."""

from ptf.config import Job
from steps.artifact import Artifact


def publish(job: Job, artifact: Artifact) -> Artifact:
    """Publish the artifact's model under the name of its lineage, and add its address. Raises what
    `ptf.publishing.publish` raises."""
    from ptf.publishing import publish as publish_version

    return publish_version(job, artifact)


def page(artifact: Artifact) -> str:
    """Return Markdown for the card of the step: the gates that were passed, and the model card."""
    from ptf.model_card import page as version_page

    return version_page(artifact)
