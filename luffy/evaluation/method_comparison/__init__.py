"""What a comparison of methods came to: accuracies over seeds and problems, tests, learning curves, costs, the page."""
