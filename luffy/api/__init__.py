"""What `import luffy` offers to notebooks and scripts; the command line shows the same."""
