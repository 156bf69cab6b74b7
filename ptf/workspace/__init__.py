"""What every process of ptf has around its work: its bond to the parent, temporary files, secrets, progress."""
