"""What a run shows of itself: metrics, the summary, progress in the terminal, curves."""
