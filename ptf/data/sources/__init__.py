"""Data files and where their rows come from: formats, local and remote files, and the Hugging Face Hub."""
