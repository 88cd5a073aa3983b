"""What `onefold demo` does with the model of examples/tiny_gpt.py, which is installed beside."""
