"""`smi up`: everything on one machine, started, watched and stopped together."""
