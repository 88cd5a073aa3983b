"""What `onefold demo` trains: a small transformer, the text, the three attentions it compares."""
