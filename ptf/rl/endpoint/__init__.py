"""An OpenAI-compatible server before the policy: an agent plays its episode over HTTP."""
