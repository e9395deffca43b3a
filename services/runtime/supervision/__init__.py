"""Child processes: started, watched, restarted and stopped."""
