"""Speed and memory, measured side by side: `python -m benchmarks.rollout`, and so on. Figures: NOTES.md."""
