"""Where stages run: replicas as threads and processes of this machine, watched and stopped together."""
